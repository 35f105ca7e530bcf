"""An OpenAI-compatible HTTP server, with sessions that keep their memory between requests.

Nothing is imported here: the command line reads the settings without torch and without the web
framework, which come with ``pip install 'transformer-xl[serve]'``.
"""
