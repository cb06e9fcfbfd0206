"""Transcripts: what a conversation has said is kept once, and sent once."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch

from rollwright._memory import Segment
from rollwright.collectors.workers.memory import Packer, unpack
from rollwright.data.transcript import Part, ReceivedTranscripts, SentGrowth, SentTranscripts, Text, Transcript


def grown(transcript: Transcript, tokens: int) -> None:
    transcript.append(list(range(tokens)))
    transcript.texts.append("x" * tokens)
    transcript.messages.append({"role": "user", "content": str(tokens)})
    transcript.mark().settle()


def sent_of(sent: SentTranscripts, transcript: Transcript) -> SentGrowth:
    """What one message has of a transcript."""
    sent.begin()
    growth = sent.growth(transcript)
    sent.finish()
    return growth


def test_views_stay_as_they_were() -> None:
    transcript = Transcript.reserved(4)
    grown(transcript, 3)
    mark = transcript.mark()
    tokens, text, chat = mark.read(), mark.text, mark.chat
    grown(transcript, 50)  # in other memory
    assert tokens.tolist() == mark.read().tolist() == [0, 1, 2]
    assert (str(text), list(chat)) == ("xxx", [{"role": "user", "content": "3"}])
    assert transcript.size == 53


def test_a_part_is_a_sequence_and_copies_as_one() -> None:
    items = [1, 2, 3, 4]
    part = Part(items, 3)
    assert (part[0], part[-1], part[1:], len(part), 4 in part, part == [1, 2, 3]) == (1, 3, [2, 3], 3, False, True)
    with pytest.raises(IndexError):
        part[3]
    assert pickle.loads(pickle.dumps(part)) == (1, 2, 3)
    assert copy.deepcopy(part) is part
    assert pickle.loads(pickle.dumps(Text(["a", "b", "c"], 2))) == "ab"


def test_a_pickle_has_a_transcript_once_and_only_what_is_complete() -> None:
    transcript = Transcript.reserved(4096)
    marks = []
    for _ in range(20):
        grown(transcript, 100)
        marks.append(transcript.mark())
    transcript.append([7] * 1000)  # of a turn that is not complete
    one, all_of_them = len(pickle.dumps(marks[-1:])), len(pickle.dumps(marks))
    assert all_of_them < one + 20 * 30
    loaded = pickle.loads(pickle.dumps(marks))
    assert loaded[3].read().tolist() == marks[3].read().tolist()
    assert loaded[19].transcript is loaded[0].transcript
    assert loaded[0].transcript.size == 2000


def test_what_was_sent_is_not_sent_again() -> None:
    sent, received, transcript = SentTranscripts(), ReceivedTranscripts(), Transcript()
    sizes = []
    for _ in range(100):
        grown(transcript, 50)
        growth = pickle.loads(pickle.dumps(sent_of(sent, transcript)))
        sizes.append(len(growth.growth.tokens))
        found = received.grown(growth)
        assert received.grown(growth) is found
        assert found.tokens(found.size).tolist() == transcript.tokens(transcript.size).tolist()
        assert (found.text, found.messages) == (transcript.text, transcript.messages)
    assert sizes == [50] * 100


def test_what_is_gone_is_let_go_and_a_gap_is_an_error() -> None:
    sent, received = SentTranscripts(), ReceivedTranscripts()
    first, other = Transcript(torch.arange(3)), Transcript(torch.arange(4))
    received.grown(sent_of(sent, first))
    missed = sent_of(sent, other)
    grown(other, 2)
    with pytest.raises(ValueError, match=r"expected what follows \(0, 0, 0\)"):
        received.grown(sent_of(sent, other))
    del first
    gc.collect()
    again = sent_of(sent, Transcript(torch.arange(2)))
    received.grown(again)
    assert list(again.gone) == [0]
    assert missed.growth.tokens.tolist() == [0, 1, 2, 3]
    restarted = SentTranscripts()  # of another process, whose numbers begin again
    assert received.grown(sent_of(restarted, other)).size == 6


def test_what_a_message_was_to_say_that_failed_is_said_again() -> None:
    segments = (Segment(), Segment())
    packer, received, transcript = Packer(segments), ReceivedTranscripts(), Transcript(torch.arange(5))
    with pytest.raises(TypeError):
        packer.pack([transcript, threading.Lock()])
    found = unpack(packer.pack([transcript]), segments, received)[0]
    grown(transcript, 3)
    assert unpack(packer.pack([transcript, transcript]), segments, received)[1] is found
    assert found.tokens(8).tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
