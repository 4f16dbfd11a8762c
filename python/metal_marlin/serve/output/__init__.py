"""Splits the text of a chat answer into content, reasoning and tool calls."""

from __future__ import annotations

from .formats import OutputFormat, OutputParser, output_format, output_parser

__all__ = ["OutputFormat", "OutputParser", "output_format", "output_parser"]
