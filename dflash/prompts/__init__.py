"""Prompts: conversations from files and from the hub, their token ids, and caches kept between requests."""

from .conversations import Conversation as Conversation
from .conversations import read_conversations as read_conversations
