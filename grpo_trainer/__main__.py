"""`python -m grpo_trainer` is the `grpo` command."""

from grpo_trainer.cli import main

if __name__ == "__main__":
    main()
