"""The engine's control routes, as the baselines call them from trainer rank 0."""

from typing import cast

import httpx

_SECONDS = 120.0


class EngineCalls:
    """A vLLM server's routes; each call raises unless it answers 200."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=_SECONDS, trust_env=False)

    def pause(self) -> None:
        """Hold requests."""
        self._post("/pause", query={"mode": "keep", "clear_cache": "false"})

    def resume(self) -> None:
        """Drop all KV blocks, and let requests run again."""
        self._post("/reset_prefix_cache", query={"reset_running_requests": "true"})
        self._post("/resume")

    def rpc(self, method: str, **arguments: object) -> list[dict[str, object]]:
        """Call a method of every worker at once; their answers by rank."""
        answer = self._post("/collective_rpc", {"method": method, "kwargs": arguments})
        return cast(list[dict[str, object]], answer.get("results", []))

    def checksums(self) -> dict[str, str]:
        """vLLM's own SHA-256 of every parameter on every rank."""
        answer = self._post("/weight_checker", {"action": "checksum"})
        return cast(dict[str, str], answer["checksums"])

    def close(self) -> None:
        """Drop the connections."""
        self._client.close()

    def _post(
        self,
        path: str,
        body: dict[str, object] | None = None,
        query: dict[str, str] | None = None,
    ) -> dict[str, object]:
        answer = self._client.post(path, json=body or {}, params=query)
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(f"{path} answered {answer.status_code}: {answer.text[:2000]}")
        return cast(dict[str, object], answer.json()) if answer.content else {}


def slowest(answers: list[dict[str, object]]) -> dict[str, float]:
    """Seconds by phase, the slowest rank's."""
    ranks = [cast(dict[str, float], answer["seconds"]) for answer in answers]
    return {phase: max(rank[phase] for rank in ranks) for phase in ranks[0]}
