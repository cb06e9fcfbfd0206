"""What an Evaluator is made of: rounds of episodes, where they run, and the desk where they are asked for."""

__all__: list[str] = []
