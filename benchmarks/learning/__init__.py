"""Do the examples learn what Stable-Baselines3 learns at equal settings, and at what cost?"""
