"""The ground floor: what trainer, server and environments share. It imports none of them, and no torch."""
