"""The rollout API: environments post scored groups, the trainer leases batches of them.

wire        the contract, all that clients need (with packing)
queue       the pure state machine; line (which groups make a batch), records and explain are its parts
store       records and the groups' bytes in SQLite; payloads: those bytes in memory and on disk
service     queue, payloads and store in step
app         what each endpoint does; http, intake, groups, answers are its parts
server      the process: socket, signals, end
"""
