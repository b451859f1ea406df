"""An operator says who drafts for a decode rank."""

from dataclasses import dataclass
from typing import Literal

from services.engine.paged.drafts.drafter import Drafter, LookupSettings
from services.engine.paged.drafts.drafting import Drafting
from services.engine.paged.drafts.model_drafter import ModelDrafter
from services.engine.paged.runner import ModelRunner

Mode = Literal["off", "lookup", "tree", "draft"]


@dataclass(frozen=True, slots=True)
class Speculation:
    """`lookup` goes on as the sequence itself did, `tree` also as others of its salt did, `draft` as a small
    model does."""

    mode: Mode = "off"
    draft_tokens: int = 5  # A sequence has so many in a step at most.
    unsalted: bool = False  # It allows `tree` where the salt is empty, too.

    def drafting(self, runner: ModelRunner, itl_target_s: float | None) -> Drafting | None:
        page_size = runner.layout.page_size
        if self.mode == "off":
            return None
        if self.mode == "draft":
            assert runner.draft is not None  # EngineSettings sees to it.
            return ModelDrafter(runner.draft, page_size, self.draft_tokens, itl_target_s)
        shares = self.mode == "tree"
        return Drafter(LookupSettings(self.draft_tokens, shares, self.unsalted, itl_target_s), page_size)
