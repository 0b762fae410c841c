from typing import Any, Mapping
def render(summary: Mapping[str, Any]) -> str:
    return ""
