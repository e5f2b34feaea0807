"""The trained model: checks, loading, adapter, forward pass, memory plan, sharding and export."""
