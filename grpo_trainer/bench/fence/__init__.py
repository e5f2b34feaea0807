"""`grpo bench fence`: check that no request ever sees half-written weights.

Two patterns of weights are written in turn, each within a fence, thousands of times, while requests run. Every answer
is one forward pass, and must be what one of the two patterns answers: a mixture of both says something else.
"""
