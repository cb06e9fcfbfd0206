"""Tools that a model may call: functions, an interpreter, parsers of calls."""

from rollwright.envs.llm.tools.core import ParsedAnswer, Tool, ToolCall, ToolParser, ToolSession
from rollwright.envs.llm.tools.functions import FunctionTool, function_schema
from rollwright.envs.llm.tools.interpreter import PythonInterpreter
from rollwright.envs.llm.tools.parsers import JSONToolParser, TemplateToolParser, XMLToolParser
from rollwright.envs.llm.tools.toolset import Toolset

__all__ = [
    "FunctionTool",
    "JSONToolParser",
    "ParsedAnswer",
    "PythonInterpreter",
    "TemplateToolParser",
    "Tool",
    "ToolCall",
    "ToolParser",
    "ToolSession",
    "Toolset",
    "XMLToolParser",
    "function_schema",
]
