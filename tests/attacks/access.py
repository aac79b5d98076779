"""What a node gives to those who have proved nothing, and what it keeps when keys change or it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from tests.attacks.lab import MIB, Key, Lab, as_user, eventually, why_no_second_user
from tests.attacks.program import Outcome, attack, main
from tests.attacks.wire import Connection, Denied, guess_target

GUESSES = 20_000
KEY = Key("program")


@attack
def guess_offline(lab: Lab, harmless: bool) -> Outcome:
    """Name a key, then test a dictionary against what came back; the control's dictionary lacks the secret."""
    secret = "correct horse battery"
    node = lab.node(16 * MIB, [Key("program", secret=secret)])
    target = guess_target(node.where, "program")
    words = [f"not the secret {number}" for number in range(GUESSES)]
    if not harmless:
        words[lab.random.randrange(GUESSES)] = secret
    tested = 0
    guessed = ""
    for word in words:
        tested += 1
        if target.fits(word.encode()):
            guessed = word
            break
    return Outcome(
        not guessed,
        f"{'the secret' if guessed else 'nothing'} found with 1 handshake, the {len(target.proof)} bytes of proof that "
        f"it brought, and {tested} guesses that the node saw nothing of",
        {"handshakes": 1, "guesses": tested},
    )


@attack
def hang_up_signal(lab: Lab, harmless: bool) -> Outcome:
    """Change the key file and send SIGHUP, as one rotates keys; the control changes and sends nothing."""
    old, new = Key("old"), Key("new")
    node = lab.node(16 * MIB, [old])
    expected, refused = (old, new) if harmless else (new, old)
    with node.connect(old) as connection:
        assert connection.put(b"key", b"value").done
    if not harmless:
        node.set_keys([new])
        os.kill(node.pid, signal.SIGHUP)

    def settled() -> bool:
        return not node.lives() or (admits(node.where, expected) and not admits(node.where, refused))

    eventually(settled, 10.0)
    alive = node.lives()
    rotated = alive and admits(node.where, expected) and not admits(node.where, refused)
    return Outcome(
        alive and rotated,
        f"the node {'lives' if alive else 'was ended by the signal'}, the keys of the file "
        f"{'are' if rotated else 'are not'} the ones that count",
        {"signals": 0 if harmless else 1},
    )


@attack
def without_keys(lab: Lab, harmless: bool) -> Outcome:
    """Use a node without keys as another user of its host; the control gives it keys."""
    if why := why_no_second_user():
        return Outcome(None, why)
    owner = KEY if harmless else None
    node = lab.node(16 * MIB, [KEY] if harmless else None)
    pair = owner.pair if owner else None
    names = [b"key %d" % number for number in range(10)]
    with open_own(node.where, node.socket, pair) as connection:
        assert all(connection.put(name, b"value").done for name in names)
    ways = (node.where, node.socket)

    def use() -> list[int]:
        rights = read = dropped = 0
        for way in ways:
            with contextlib.suppress(OSError, Denied), Connection(way) as connection:
                rights = connection.rights
                read += sum(connection.get(name).done for name in names)
                dropped += sum(connection.drop(name).done for name in names)
        return [rights, read, dropped]

    rights, read, dropped = as_user(65432, 65431, use)
    return Outcome(
        not rights and not read and not dropped,
        f"another user id has {rights} of 4 rights, read {read} and deleted {dropped} of {len(names)} objects",
        {"objects of the owner": len(names), "connections of another user": len(ways)},
    )


@attack
def leave_memory_behind(lab: Lab, harmless: bool) -> Outcome:
    """Kill an ephemeral node with SIGKILL, and look for its memory; the control uses SIGTERM."""
    node = lab.node(64 * MIB, [KEY], ephemeral=True)
    with node.connect(KEY) as connection:
        puts = sum(connection.put(b"%d" % number, bytes(MIB)).done for number in range(32))
    before = node.shared_memory()
    if harmless:
        node.terminate()
    else:
        node.kill()
    deadline = time.monotonic() + 5  # somebody may be on the way to remove it
    while (left := node.shared_memory()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return Outcome(
        not left,
        f"{left // 1024} of {before // 1024} KiB of shared memory left behind",
        {"puts of 1 MiB": puts},
    )


def open_own(where: tuple[str, int], socket: str, pair: tuple[str, str] | None) -> Connection:
    """A connection of the node's own user: over TCP where that is let in, else over the UNIX socket."""
    try:
        return Connection(where, pair)
    except (OSError, Denied):
        return Connection(socket, pair)


def admits(where: tuple[str, int], key: Key) -> bool:
    """Whether a node lets a key in."""
    try:
        with Connection(where, key.pair, timeout=5.0) as connection:
            return connection.ping().done
    except (OSError, Denied):
        return False


if __name__ == "__main__":
    main()
