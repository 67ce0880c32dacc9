"""One engine rank's side of a session: join, receive, commit.

No public method raises. An exception in a vLLM worker leaves later replies out of step for good
(vllm#49972), so every outcome is reported on the control board, where the trainer reads it.
Not here: vLLM (`engine.py`, `extension.py`), where the bytes land (`install`).
"""

import gc
import logging
from collections.abc import Callable, Mapping

import msgspec

from reshard.board import BoardClient, Deadline
from reshard.board.client import LOST_SECONDS
from reshard.session import CommitInfo, ConnectInfo, ReceiveInfo
from reshard_vllm.attempt import Attempt
from reshard_vllm.membership import Membership
from reshard_vllm.target import Target

logger = logging.getLogger(__name__)

Message = Mapping[str, object]


class Receiver:
    """Joins sessions and receives versions, for one engine rank.

    At most one session is open, and at most one attempt runs. Calls come from the worker's main
    thread; the bytes arrive on a thread of the attempt, so that the engine goes on generating.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._session: Membership | None = None
        self._attempt: Attempt | None = None
        self._fence = ""
        self._version: int | None = None
        self._last_error = ""
        self.update_active = False

    def connect(self, message: Message) -> None:
        """Join (or rejoin) a session; `message` is a `ConnectInfo`."""
        self._guarded("connect", lambda: self._connect(msgspec.convert(message, ConnectInfo)))

    def receive(self, message: Message) -> None:
        """Start receiving a version; `message` is a `ReceiveInfo`. Returns at once."""
        self._guarded("receive", lambda: self._receive(msgspec.convert(message, ReceiveInfo)))

    def commit(self, message: Message) -> None:
        """Make the received version live; `message` is a `CommitInfo`."""
        self._guarded("commit", lambda: self._commit(msgspec.convert(message, CommitInfo)))

    def status(self, message: Message) -> dict[str, object]:
        """This rank's state; `nonce` of the message is echoed, to tell answers apart."""
        return {
            "nonce": message.get("nonce", ""),
            "rank": int(self._target.rank),
            "version": self._version,
            "fenced": self._fence,
            "run_id": self._session.info.run_id if self._session else "",
            "epoch": self._session.info.epoch if self._session else 0,
            "last_error": self._last_error,
            "update_active": self.update_active,
        }

    def close(self) -> None:
        """Leave the session, if any."""
        self._guarded("close", self._leave)

    def _guarded(self, phase: str, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            self._last_error = f"{phase}: {error}"
            logger.exception("reshard: %s failed on engine rank %d", phase, self._target.rank)

    def _connect(self, info: ConnectInfo) -> None:
        deadline = Deadline.after(info.deadline_seconds)
        lost = min(LOST_SECONDS, info.deadline_seconds)
        board = BoardClient(info.invitation, deadline, lost_seconds=lost)
        refusal = self._refusal(info)
        newcomer = Membership(info, board, self._target)
        if refusal:
            newcomer.introduce("taken", refusal, self._version, self.update_active)
            newcomer.close()
            return
        try:
            self._leave()
            self._session = newcomer
            self._enter(newcomer, deadline)
        except Exception as error:
            newcomer.report_fault("connect", f"{type(error).__name__}: {error}")
            raise

    def _enter(self, newcomer: Membership, deadline: Deadline) -> None:
        state, detail = self._target.state()
        if self._fence and state == "ready":
            newcomer.introduce("fenced", self._fence, self._version, self.update_active)
        else:
            newcomer.introduce(state, detail, self._version, self.update_active)
        if state == "ready":
            newcomer.join(deadline)

    def _refusal(self, info: ConnectInfo) -> str:
        """Why this rank stays with its present session; empty if it does not."""
        current = self._session
        if current is None or info.takeover:
            return ""
        if current.info.run_id == info.run_id:
            if info.epoch > current.info.epoch:
                return ""
            return f"epoch {info.epoch} is not newer than {current.info.epoch}"
        if not current.trainer_answers():
            logger.warning("reshard: run %s is gone, %s follows", current.info.run_id, info.run_id)
            return ""
        return (
            f"this engine is in a session with run {current.info.run_id}; close that trainer's "
            "hook, or attach with takeover=True"
        )

    def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            # Wakes an attempt that still waits for bytes: it must end before buffers are reused.
            session.close()
        if self._attempt is not None:
            received = self._attempt.received
            self._attempt.end()
            self._attempt = None
            if not received:
                # An error whose traceback leads back to it keeps the memory of others mapped.
                del session
                gc.collect()

    def _receive(self, info: ReceiveInfo) -> None:
        session = self._current(info.run_id, info.epoch)
        if self._attempt is not None:
            self._attempt.end()
        self._attempt = Attempt(session, info, self._note_torn)
        self._attempt.start()

    def _commit(self, info: CommitInfo) -> None:
        session = self._current(info.run_id, info.epoch)
        attempt = self._attempt
        if attempt is None or attempt.info.attempt != info.attempt:
            session.report_commit(info, "no bytes of this attempt were received", {})
            return
        error = attempt.commit()
        if not error:
            self._version, self._fence, self._last_error = info.version, "", ""
        session.report_commit(info, error, attempt.commit_seconds)

    def _note_torn(self, why: str) -> None:
        """The live weights may be of two versions: refuse to pass for ready until a full refit."""
        self._fence = why

    def _current(self, run_id: str, epoch: int) -> Membership:
        session = self._session
        if session is None or (session.info.run_id, session.info.epoch) != (run_id, epoch):
            held = f"run {session.info.run_id} epoch {session.info.epoch}" if session else "none"
            raise RuntimeError(f"message of run {run_id} epoch {epoch}; open session: {held}")
        return session
