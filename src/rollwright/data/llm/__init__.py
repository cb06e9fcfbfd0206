"""Conversations with language models: turns, chat histories, ragged records."""
