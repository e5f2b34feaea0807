"""The model that is trained: checked, loaded, given its adapter."""
