"""Scripts and bodies of the rollout API's pages."""
