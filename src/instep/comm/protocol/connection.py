"""A process's connection to the master, which may be lost and replaced by another process.

A message is kept until the master acknowledges it, and is sent again to the next master, which
listens at the same address. While the process is busy, a thread receives messages and sends
heartbeats (`listen`). The meaning of messages is not known here, except for `Ack`, and for whether
a message answers the `question`.

Between hosts packets may be lost without an error, so there a connection has a lease (`keep`).
The master acknowledges each heartbeat. Without an acknowledgement in time the lease expires, and
the process reconnects until it gets one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from instep.comm.protocol.channel import Address, Channel
from instep.comm.protocol.heartbeat_lease import LEASE_S, HeartbeatLease
from instep.comm.protocol.master_inbox import MasterInbox
from instep.comm.protocol.messages import (
    Ack,
    AnyMessage,
    Heartbeat,
    Hello,
    Refused,
    StoreValue,
    Welcome,
)
from instep.comm.protocol.unacknowledged import MessageStore, Unacknowledged
from instep.errors import PeerError, StrangerError

if TYPE_CHECKING:
    import ssl

HEARTBEAT_S = 0.2
"""Seconds between two heartbeats of a process."""

RECONNECT_S = 1.0
"""Seconds between two attempts to reconnect."""

GIVE_UP_S = 600.0
"""How long a process tries to reach its master, or one that answers."""

ANSWER_S = 120.0
"""How long the first master may take to answer: on a busy machine it begins slowly."""

AGAIN_S = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Pauses before further connections where one was closed without an answer, as by a master that is
flooded with strangers."""

MOST_STRANGERS = 5
"""Connections in a row to what is no master of this run; a single one may be an accident."""


class MasterConnection:
    """One process's connection to the present master.

    Args:
        address: of the present master and of each that replaces it.
        hello: the first message on every connection.
        context: for TLS; without it connections are not encrypted.

    Raises:
        PeerError: no master of this version answers there.
    """

    def __init__(
        self, address: Address, hello: Hello, context: ssl.SSLContext | None = None
    ) -> None:
        self._address, self._context = address, context
        self.hello = hello
        """Sent again to the next master; `generation` may be changed meanwhile."""
        self.lasting = False
        """Whether to wait for the next master if this one is lost."""
        self.unacknowledged = Unacknowledged()
        self._lease = HeartbeatLease()
        self.inbox = MasterInbox(self._take_in)
        self._arrived = self.inbox.arrived  # its lock is held to send, too
        self.refusal: PeerError | None = None
        """Why the master, or who listens in its place, has ended the connection; if it has."""
        self._closed = self._welcomed = False
        self._severed = False
        self._unanswered = 0  # connections in a row on which nothing has arrived
        self._strangers = 0  # the same, at whose other end was no master of this run
        self._tries_since: float | None = None  # without an answer
        self._beat_at = self._reconnected_at = time.monotonic()
        self._channel = Channel.connect(address, context=context)
        self._channel.send(hello)

    def welcome(self) -> Welcome | Refused:
        """The first master's reply to `hello`; those of later masters are dropped.

        Raises:
            PeerError: there is no master, or what listens there does not answer.
        """
        deadline = time.monotonic() + ANSWER_S
        while (left_s := deadline - time.monotonic()) > 0:
            message: Welcome | Refused | None = self.inbox.look(left_s, Welcome, Refused)
            if message is not None:
                self._welcomed = True
                return message
        self.close()
        where = f"{self._address.host}:{self._address.port}"
        raise PeerError(f"what listens at {where} does not answer, for {ANSWER_S:g} s.")

    def fileno(self) -> int:
        """Of the present connection, for `select`; -1 while there is none."""
        return self._channel.fileno()

    # ---- where packets may be lost

    def keep(self, lease_s: float = LEASE_S) -> None:
        """From now on have a lease, which acknowledged heartbeats renew."""
        self._lease.begin(lease_s)
        self._reconnected_at, self._beat_at = time.monotonic(), -HEARTBEAT_S
        self._channel.give_up_after(2 * lease_s)

    @property
    def lapsed(self) -> bool:
        """Whether the lease has expired, so that this process may have been replaced."""
        gone = self._lease.length_s is not None and self.inbox.gone is not None
        return gone or self._lease.expired

    def wait_for_lease(self) -> None:
        """Wait until the lease is valid; for a process with a listening thread.

        Raises:
            PeerError: there is no master any more.
        """
        with self._arrived:
            while self.lapsed:
                if self.inbox.gone is not None:
                    raise self.inbox.gone
                self._arrived.wait(HEARTBEAT_S)

    def show(self, heartbeat: Callable[[], Heartbeat]) -> None:
        """Send a heartbeat if it is due; reconnect if the lease has expired."""
        now = time.monotonic()
        if now - self._beat_at >= HEARTBEAT_S:
            self._beat_at = now
            self._beat(heartbeat())
        if (self._severed or self.lapsed) and now - self._reconnected_at > RECONNECT_S:
            self._reconnect()

    def _reconnect(self) -> None:
        with self._arrived:
            self._channel.close()
            self._severed = True
        channel, gone, why = None, None, "it does not answer"
        try:
            channel = Channel.connect(self._address, RECONNECT_S / 2, self._context)
            channel.give_up_after(2 * (self._lease.length_s or LEASE_S))
        except TimeoutError as error:
            why = str(error)
        except PeerError as error:  # the client is gone too
            gone = error
        if self._has_tried_for_long():
            gone = gone or PeerError(f"the master cannot be reached ({why}).")
        with self._arrived:
            self._reconnected_at = time.monotonic()
            self.inbox.gone = self.inbox.gone or gone
            if channel is not None and (self._closed or gone is not None):
                channel.close()
            elif channel is not None:
                self._severed = not self._introduce(channel)
            self._arrived.notify_all()

    def _has_tried_for_long(self) -> bool:
        now = time.monotonic()
        self._tries_since = now if self._tries_since is None else self._tries_since
        return now - self._tries_since > GIVE_UP_S

    def _introduce(self, channel: Channel) -> bool:
        """Send `hello` on a new connection, and everything that was not acknowledged.

        Returns:
            False if that connection is lost as well.
        """
        self._channel = channel
        self._lease.forget()
        try:
            for message in self.unacknowledged.again(self.hello):
                channel.send(message)
        except PeerError:
            channel.close()
            return False
        return True

    # ---- what is sent

    def send(self, message: AnyMessage) -> None:
        """Send one message; if `lasting`, to the next master too.

        Raises:
            PeerError: there is no master any more.
        """
        with self._arrived:
            if self.inbox.gone is not None:
                raise self.inbox.gone
            if self.lasting:
                self.unacknowledged.add(message)
            try:
                self._channel.send(message)
            except PeerError as error:
                if not self.lasting:
                    raise
                if not (self.inbox.thread or self._lease.length_s):  # else `show` notices
                    self._connect_to_next(error)

    def keep_in(self, store: MessageStore) -> None:
        """From now on keep what a new process in the place of this one would send again, and send
        what an earlier one has left; before the first message."""
        with self._arrived:
            self.unacknowledged.keep_in(store)
            for message in list(self.unacknowledged.messages):
                with suppress(PeerError):  # reading fails too, and reconnects
                    self._channel.send(message)

    def wait_until_acknowledged(self, timeout_s: float) -> None:
        """Wait until everything is acknowledged, by this master or the next.

        Returns also after `timeout_s` seconds, and if there is no master any more.
        """
        deadline = time.monotonic() + timeout_s
        with self._arrived:
            while (
                self.unacknowledged.messages
                and not self.inbox.gone
                and (left_s := deadline - time.monotonic()) > 0
            ):
                self.inbox.wait(min(left_s, HEARTBEAT_S))

    # ---- while the process is busy

    def listen(
        self,
        heartbeat: Callable[[], Heartbeat],
        on_arrival: Callable[[AnyMessage], None],
        on_lapse: Callable[[], None] = lambda: None,
    ) -> None:
        """From now on receive messages and send heartbeats in a thread.

        Args:
            heartbeat: makes the heartbeat; called in that thread a few times a second.
            on_arrival: gets each message when it arrives, in that thread; must not wait.
            on_lapse: called there repeatedly while the lease is expired, and once if there is no
                master any more: otherwise the process could wait forever for a peer that hangs.
        """
        self.inbox.thread = threading.Thread(
            target=self._listen,
            args=(heartbeat, on_arrival, on_lapse),
            name="instep connection",
            daemon=True,
        )
        self.inbox.thread.start()

    def _listen(
        self,
        heartbeat: Callable[[], Heartbeat],
        on_arrival: Callable[[AnyMessage], None],
        on_lapse: Callable[[], None],
    ) -> None:
        while not self._closed and self.inbox.gone is None:
            self.show(heartbeat)
            for message in self._take_in(HEARTBEAT_S):
                on_arrival(message)
            if self.lapsed:
                on_lapse()
        if (self.inbox.gone is not None or self.lapsed) and not self._closed:
            on_lapse()

    def _beat(self, heartbeat: Heartbeat) -> None:
        with self._arrived, suppress(PeerError):  # reading fails too, and reconnects
            self._channel.send(self._lease.sent(heartbeat))

    def _take_in(self, timeout_s: float | None) -> list[AnyMessage]:
        if self._severed:
            time.sleep(HEARTBEAT_S if timeout_s is None else min(timeout_s, HEARTBEAT_S))
            return []
        try:
            messages = self._channel.read() if self._channel.wait(timeout_s) else []
        except PeerError as error:
            messages = []
            if not self._closed:
                with self._arrived:
                    self._lose(error)
                    self._arrived.notify_all()
        if not messages:
            return []
        self._unanswered, self._strangers, self._tries_since = 0, 0, None
        with self._arrived:
            found = [message for message in messages if not self._is_own(message)]
            self.inbox.add(found)
        return found

    def _is_own(self, message: AnyMessage) -> bool:
        match message:
            case Ack(count=count, heartbeat=heartbeat):
                self._lease.acknowledged(heartbeat)
                self.unacknowledged.acknowledged(count)
            case Welcome() if self._welcomed:
                pass
            case Refused(text=text) if self._welcomed:
                self.inbox.gone = self.refusal = PeerError(text)
            case StoreValue(key=key):
                return not self.unacknowledged.answered(key)
            case _:
                return False
        return True

    # ---- when the master is lost

    def _lose(self, error: PeerError) -> None:
        self._strangers += isinstance(error, StrangerError)
        if self._strangers >= MOST_STRANGERS:
            self._channel.close()
            where = f"{self._address.host}:{self._address.port}"
            self.inbox.gone = StrangerError(
                f"what listens at {where} is no master of this run, or the clocks of the two "
                f"machines differ by more than a day: {error}"
            )
        elif self._lease.length_s is None:
            self._connect_to_next(error)
        else:
            self._channel.close()
            self._severed = True  # `show` reconnects

    def _connect_to_next(self, error: PeerError) -> None:
        self._channel.close()
        while self.lasting and not self._closed and not self._has_tried_for_long():
            time.sleep(AGAIN_S[min(self._unanswered, len(AGAIN_S) - 1)])
            self._unanswered += 1
            try:
                channel = Channel.connect(self._address, context=self._context)
            except PeerError as refused:  # the client is gone too
                error = refused
                break
            if self._introduce(channel):
                return
        self.inbox.gone = error

    def close(self) -> None:
        """Close; a second call does nothing."""
        self._closed = True
        with self._arrived:
            self._channel.close()
