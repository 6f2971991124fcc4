"""Serves a model over HTTP: OpenAI's interface, the original's PUT /api, and a page to try it."""
