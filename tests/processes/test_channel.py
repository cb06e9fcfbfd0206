"""Channel: what is said arrives whole and in order, whatever room there is and whoever is interrupted."""

import signal
import threading
import time

import pytest

from rollwright._processes.channel import Channel, ChannelClosed

LIMIT_S = 100.0  # for what comes at once, on a busy machine too
LONG = bytes(3_000_000)


@pytest.fixture
def line():
    ends = Channel.pair()
    yield ends
    for end in ends:
        end.close()


def read(channel, count):
    return [channel.recv(LIMIT_S) for _ in range(count)]


def test_posting_does_not_wait(line):
    mine, theirs = line
    for message in (LONG, 1):
        mine.post(message)
    assert mine.behind
    assert not theirs.poll()  # the first is not there as a whole
    assert theirs.partial
    while mine.behind:
        mine.flush()
        theirs.poll()
    assert read(theirs, 2) == [LONG, 1]


def in_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_what_was_posted_goes_before_what_is_sent(line):
    mine, theirs = line
    found = []
    mine.post(LONG)
    thread = in_thread(lambda: found.extend(read(theirs, 2)))
    mine.send(2, LIMIT_S)
    thread.join()
    assert found == [LONG, 2]


def test_threads_that_send_at_once_mix_nothing(line):
    mine, theirs = line
    parts = [bytes([number]) * 200_000 for number in range(4)]
    threads = [threading.Thread(target=lambda part=part: [mine.send(part) for _ in range(5)]) for part in parts]
    for thread in threads:
        thread.start()
    found = read(theirs, 20)
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(parts * 5)


def test_an_interrupt_of_the_wait_for_room_leaves_the_message_whole(line):
    mine, theirs = line

    def press():
        while not mine.behind:
            time.sleep(0)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before, found = signal.signal(signal.SIGINT, signal.default_int_handler), []
    in_thread(press)
    try:
        with pytest.raises(KeyboardInterrupt):
            mine.send(LONG, LIMIT_S)
    finally:
        signal.signal(signal.SIGINT, before)
    assert mine.behind
    thread = in_thread(lambda: found.extend(read(theirs, 2)))
    mine.send(2, LIMIT_S)
    thread.join()
    assert found == [LONG, 2]


def test_one_that_does_not_read(line):
    mine, theirs = line
    with pytest.raises(TimeoutError, match=r"waited 0\.01 s for the other process"):
        mine.send(LONG, 0.01)
    assert mine.closed
    with pytest.raises(ChannelClosed):
        theirs.recv(LIMIT_S)


def test_one_that_is_gone(line):
    mine, theirs = line
    mine.post(LONG)
    theirs.close()
    for call in (mine.flush, lambda: mine.post(1), lambda: mine.send(1)):
        with pytest.raises(ChannelClosed, match="the other end is gone"):
            call()
    assert not mine.behind
