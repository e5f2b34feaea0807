"""``python -m environments.agent``, which is ``grpo env agent``."""

from environments.agent.env import AgentEnv

if __name__ == "__main__":
    AgentEnv.cli()
