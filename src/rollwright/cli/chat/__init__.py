"""Commands about conversations with language models: ``chat-collect``, ``chat-check``, and the view of a trace."""
