"""Errors as OpenAI's interface tells them."""

from __future__ import annotations

from typing import Any

__all__ = ["ApiError"]


class ApiError(Exception):
    """A request that is refused.

    Args:
        status: HTTP's number.
        message: For a person: what is wrong and what to do.
        parameter: The member of the request that is wrong.
        code: A word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        parameter: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.parameter, self.code = status, parameter, code

    def body(self) -> dict[str, Any]:
        """The JSON that says so."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self),
                "type": kinds.get(self.status, kind),
                "param": self.parameter,
                "code": self.code,
            }
        }
