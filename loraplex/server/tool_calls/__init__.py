"""Calls of tools: how models write them, how they are found in answers, and grammars that enforce them."""
