"""An environment of agents: programs that call the policy as they call OpenAI's API."""
