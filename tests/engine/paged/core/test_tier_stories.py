"""These tests show what a core reads from its tier, as stories."""

import os

import pytest

from engine.paged.core.test_core_tiers import TieredRank, prompt_of
from plugins.transcripts import stem, transcripts_beside
from services.engine.fake import continuation
from services.engine.paged.sequence import Phase
from services.tier.copies import LoadCopy


class Stories:
    """A rank with a tier, and the commands of its stories:

    stored N              the first N tokens of the prompt are in the tier, and not in the pool any more
    ask NAME tokens=N     the first N tokens come as a request; receives=yes: prefill computes them
                          held=M: a source is said to hold M
    read                  the tier's thread runs what it was given to read
    flip BLOCK            a byte of that block changes in the tier
    late                  so much time passes that no read is waited for any more
    write NAME            prefill writes what was asked of it
    refuse NAME           the source holds nothing after all
    end NAME              the request is computed to its end
    """

    def __init__(self):
        self.rank = TieredRank(num_pages=72)
        self.prompt = prompt_of(1, 80)
        self.seqs = {}

    def perform(self, command):
        words, options = command.words, command.options
        match command.name:
            case "stored":
                self.rank.generate(self.prompt[: int(words[0]) + 1])
                self.rank.fill_pool(2)
                self.rank.core.cache.clear()
                self.rank.reserved.clear()
            case "ask":
                how = {"receives": "receives" in options}
                held = int(options["held"]) if "held" in options else None
                prompt = self.prompt[: int(options["tokens"])]
                self.seqs[words[0]] = self.rank.submit(prompt, 3, held=held, **how)
                self.rank.step()
            case "read":
                self.rank.thread.run(LoadCopy)
                self.rank.step()
            case "flip":
                (load,) = (copy for copy in self.rank.thread.waiting if isinstance(copy, LoadCopy))
                at = self.rank.slot_at(load.pieces[int(words[0])].place)
                os.pwrite(self.rank.slabs[0]._fd, b"\xee", at + 3)
            case "late":
                self.rank.now += 31.0
                self.rank.step()
            case "write":
                self.rank.land(self.seqs[words[0]])
            case "refuse":
                self.rank.core.pulls.failed(self.seqs[words[0]])
            case "end":
                self.rank.run([self.seqs[words[0]]])
        return [line for name in self.seqs for line in self._tell(name)]

    def _tell(self, name):
        seq = self.seqs[name]
        if seq in self.rank.finished:
            right = self.rank.tokens[seq] == continuation(seq.request.prompt_ids, 3)
            yield f"{name}: ended, {seq.reused_tokens} tokens reused, {'right' if right else 'wrong'} tokens"
            return
        yield f"{name}: {seq.phase.name.lower()}, {seq.computed} tokens are here"
        if seq.phase is Phase.RECEIVING:
            reserved = self.rank.reserved[seq]
            ticket = "none yet" if reserved.fills else f"from {reserved.prefix_len}"
            yield f"{name}: ticket {ticket}"


@pytest.mark.parametrize("path", transcripts_beside(__file__), ids=stem)
def test_tiers(path, play):
    play(path, Stories().perform)
