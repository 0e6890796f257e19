"""The lives of requests from their lookup on: what each may resume from, found at once or meanwhile."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from hybridkv.clock import Clock
from hybridkv.errors import StoreClosedError
from hybridkv.plan.lookup import LookupResult
from hybridkv.service.jobs import Life, Misses
from hybridkv.service.lookup import LookupDriver, LookupOutcome
from hybridkv.service.progress import Counters
from hybridkv.service.settings import SchedulerSettings
from hybridkv.specs.layout import Layout
from hybridkv.transfer.ledger import Ledger


@dataclass(slots=True, eq=False)
class _Question:
    """A lookup of a life that was sent.

    Attributes:
        device_prefix: from where it was asked.
        sent_s: when it was sent; once it is answered, when the answer was taken.
        future: the answer to come.
        answer: the answer; ``None`` where there is none, or while it is awaited.
    """

    device_prefix: int
    sent_s: float
    future: Future[LookupOutcome] | None
    answer: LookupResult | None = None


class Hits:
    """Finds each request's hit and keeps its life.

    Args:
        driver: looks prompts up.
        layout: of the driver's keys.
        settings: how long to wait, what is worth loading.
        clock: tells when a deadline or an answer's age has passed.
        counters: of late lookups.

    Attributes:
        lives: by request id.
    """

    def __init__(
        self,
        driver: LookupDriver,
        layout: Layout,
        settings: SchedulerSettings,
        *,
        clock: Clock,
        counters: Counters,
    ) -> None:
        self._driver, self._layout, self._settings = driver, layout, settings
        self._clock, self._counters = clock, counters
        self._questions: dict[str, _Question] = {}
        self.lives: dict[str, Life] = {}

    def begin(
        self, request_id: str, num_tokens: int, blob: bytes, *, device_prefix: int, may_save: bool
    ) -> Life:
        """Return a new life of a request; what its loads have missed so far goes on counting."""
        old = self.lives.get(request_id)
        self._questions.pop(request_id, None)
        life = Life(
            request_id=request_id,
            num_tokens=num_tokens,
            blob=blob,
            ledger=Ledger(
                [num_tokens // group.object_size for group in self._layout.spec_groups],
                tries=self._settings.save_tries,
            ),
            may_save=may_save and num_tokens >= self._settings.least_save_tokens,
            misses=old.misses if old is not None else Misses(),
        )
        life.resume_at(device_prefix, device_prefix)
        self.lives[request_id] = life
        return life

    def is_waiting(self, request_id: str, num_tokens: int) -> bool:
        """Return whether a request of that id and length has been asked for and has not started yet."""
        life = self.lives.get(request_id)
        return life is not None and not life.is_started and life.num_tokens == num_tokens

    def look_up(self, life: Life) -> None:
        """Set a life's hit, waiting for the store."""
        if self._may_load(life):
            found = self._driver.lookup(
                life.num_tokens,
                life.blob,
                device_prefix=life.device_prefix,
                timeout_s=self._settings.lookup_timeout_s,
                absent=life.misses.keys,
            ).result
            self._take(life, life.device_prefix, found)

    def ask(self, life: Life, device_prefix: int) -> bool:
        """Send a life's lookup unless it was sent, take what has come; return whether its hit is known.

        A hit that was found from a smaller device prefix holds for a larger one, too: above a legal prefix a
        hit needs less. From a smaller one, or when the answer is old, the store is asked again.
        """
        question = self._questions.get(life.request_id)
        if question is None or self._is_void(question, device_prefix):
            if not self._may_load(life):
                self._take(life, device_prefix, None)
                return True
            question = self._send(life, device_prefix)
        if question.future is not None and not self._is_answered(question, question.future):
            return False
        self._take(life, device_prefix, question.answer)
        return True

    def forget(self, request_id: str) -> None:
        """End a request's life; an answer on its way goes nowhere."""
        self.lives.pop(request_id, None)
        self._questions.pop(request_id, None)

    def drop_answers(self) -> None:
        """Forget what the store has said of requests that wait."""
        self._questions.clear()

    def _may_load(self, life: Life) -> bool:
        return life.may_load and life.misses.num_loads < self._settings.load_tries

    def _is_void(self, question: _Question, device_prefix: int) -> bool:
        age_s = self._clock.now_s() - question.sent_s
        is_old = question.future is None and age_s > self._settings.answer_s
        return is_old or device_prefix < question.device_prefix

    def _send(self, life: Life, device_prefix: int) -> _Question:
        question = _Question(device_prefix, self._clock.now_s(), None)
        self._questions[life.request_id] = question
        with suppress(StoreClosedError):  # the engine is shutting down: a miss
            question.future = self._driver.submit(
                life.num_tokens,
                life.blob,
                device_prefix=device_prefix,
                timeout_s=self._settings.lookup_timeout_s,
                absent=frozenset(life.misses.keys),
            )
        return question

    def _is_answered(self, question: _Question, future: Future[LookupOutcome]) -> bool:
        now_s, timeout_s = self._clock.now_s(), self._settings.lookup_timeout_s
        if future.done():
            question.answer = None if future.exception() is not None else future.result().result
        elif timeout_s is not None and now_s - question.sent_s >= timeout_s:
            # The lookup keeps its own deadline; it may still wait for a thread.
            self._counters.lookups_late += 1
            future.cancel()
        else:
            return False
        question.future, question.sent_s = None, now_s
        return True

    def _take(self, life: Life, device_prefix: int, found: LookupResult | None) -> None:
        life.resume_at(device_prefix, device_prefix)
        if found is None:
            return
        life.junction = found.full_run if found.full_run > found.hit else 0
        if found.hit - device_prefix >= self._settings.least_load_tokens:
            life.resume_at(device_prefix, found.hit)


Blob = Callable[[], bytes]
"""Makes a prompt's block hashes when they are needed."""
