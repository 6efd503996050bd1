"""Prompts: conversations from files and from the hub, their token ids, and caches kept between requests."""
