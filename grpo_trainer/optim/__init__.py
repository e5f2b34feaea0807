"""The optimizer (`adamw.py`), its states in 8 bits (`eight_bits.py`), and what surrounds its steps (`steps.py`)."""
