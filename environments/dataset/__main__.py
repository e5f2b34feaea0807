"""``python -m environments.dataset``, which is ``grpo env dataset``."""

from environments.dataset.env import DatasetEnv

if __name__ == "__main__":
    DatasetEnv.cli()
