"""Where a rank stands in its training data, and how a restarted process gets there again.

Three ways of giving data to DeepSpeed:

* ``training_data=`` given to ``deepspeed.initialize``: the engine owns the loader. The generators' states at the
  begin of the epoch and before its first batch, the sampler's epoch and the number of batches drawn are kept. A
  restarted process sets those states, begins the epoch and skips as many batches: exact for any sampler of torch.
* an iterator given to ``train_batch``, or set by ``set_dataloader``: items drawn from it are counted, and a
  restarted process skips as many, unless the script has registered an object named ``data``: the position is its.
* a script that draws its batches itself and calls ``engine(batch)``: the position is the script's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader

from ftckpt.errors import ConfigError
from ftckpt.live import rng


class Epochs:
    """The generators' states at the last begin of each loader's epoch, while ``watched`` is entered."""

    def __init__(self) -> None:
        self._begun: dict[int, Mapping[str, Any]] = {}

    def of(self, loader: Any) -> Mapping[str, Any] | None:
        """The states when the epoch under way began; None where none did."""
        return self._begun.get(id(loader))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within it, any loader of DeepSpeed may begin an epoch: a PipelineEngine's does when it is built."""
        original = DeepSpeedDataLoader.__iter__

        def begin(loader: Any) -> Any:
            self._begun[id(loader)] = rng.save_generators()
            return original(loader)

        DeepSpeedDataLoader.__iter__ = begin
        try:
            yield
        finally:
            DeepSpeedDataLoader.__iter__ = original


class _Counted:
    """An iterator, and how many items were drawn from it."""

    def __init__(self, inner: Iterator[Any]) -> None:
        self.inner = inner
        self.drawn = 0

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        item = next(self.inner)
        self.drawn += 1
        return item

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner, name)


class DataPosition:
    """Saved and loaded as one of the objects of the training state.

    Args:
        engine: whose data it is.
        begun: of an epoch that began before this object was made.
        owned_by_script: the script has registered an object that knows the position of its own iterators.
    """

    def __init__(self, engine: Any, begun: Epochs, owned_by_script: bool) -> None:
        self._engine = engine
        self._owned_by_script = owned_by_script
        self.set_rng: Callable[[], None] = _nothing
        """Sets the generators to what was restored; called before the first batch is drawn."""
        self.tell: Callable[[str], None] = _nothing
        """Takes one line for people."""
        self._given = engine.training_dataloader
        self._loader = _engine_loader(self._given)
        self._epoch: dict[str, Any] = {"begin": begun.of(self._loader), "first": None, "sampler": None, "drawn": 0}
        self._counted: _Counted | None = None
        self._restored: Mapping[str, Any] | None = None
        self._rng_is_set = False
        self._behind = False
        """The restored epoch has begun, and its batches have yet to be skipped."""
        self._peeked = False
        """A batch was drawn, and nothing was trained yet."""
        self._class: type | None = None
        if self._loader is not None:
            self._epoch["sampler"] = getattr(self._loader.data_sampler, "epoch", None)
            self._follow_loader()

    @property
    def is_known(self) -> bool:
        """Whether anything here, or an object of the script, says where in the data training stands."""
        return self._loader is not None or self._owned_by_script or bool(self._engine.pipeline_parallelism)

    def state_dict(self) -> dict[str, Any]:
        """The position at this boundary."""
        return {"epoch": dict(self._epoch), "drawn": self._counted.drawn if self._counted is not None else 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand there before the first batch is drawn."""
        self._restored = state

    def begin_training(self) -> None:
        """The first batch is about to be used: go to the position, then set RNG unless a batch drawn has done so."""
        if self._restored is not None and isinstance(self._given, RepeatingLoader):
            self._given.data_iter = iter(self._given.loader)
            if self._behind:
                self._replay(self._class, self._loader)
        self._set_rng_once()
        if not self._engine.pipeline_parallelism:
            self._restored = None

    def draw_from(self, given: Any) -> Any:
        """What ``train_batch`` shall draw from where it is given ``given``; items of the script's are counted."""
        iterator = given if given is not None else self._engine.data_iterator
        if iterator is None or iterator is self._given:
            self._restored = None
            return given
        if isinstance(iterator, _Counted):
            self._counted = iterator
        elif self._counted is None or self._counted.inner is not iterator:
            self._counted = _Counted(iterator)
        if self._restored is not None:
            self._skip(self._counted, self._restored["drawn"])
            self._restored = None
        if given is None:
            self._engine.data_iterator = self._counted
            return None
        return self._counted

    def remove(self) -> None:
        """Follow the engine's loader and the script's iterator no longer."""
        if self._counted is not None and self._engine.data_iterator is self._counted:
            self._engine.data_iterator = self._counted.inner
        if self._class is not None:
            self._loader.__class__ = self._class
            self._class = None

    def _set_rng_once(self) -> None:
        if not self._rng_is_set:
            self._rng_is_set = True
            self.set_rng()

    def _is_under_way(self, loader: Any) -> bool:
        """Whether the epoch that is restored had begun and not all of its batches were drawn."""
        assert self._restored is not None
        epoch = self._restored["epoch"]
        return epoch["drawn"] < len(loader) and (epoch["begin"] is not None or epoch["drawn"] > 0)

    def _skip(self, counted: _Counted, number: int) -> None:
        if not number:
            return
        if self._owned_by_script:
            self.tell("data: where the iterator given to train_batch stands is left to the registered object")
            return
        self.tell(f"data: skipping the {number} items that were drawn before from the iterator given to train_batch")
        for index in range(number):
            try:
                next(counted)
            except StopIteration:
                raise ConfigError(
                    f"data: the iterator given to train_batch ends after {index} of the {number} items that were "
                    "drawn before; register an object that knows the position (ftckpt.deepspeed.register)"
                ) from None
        self.set_rng()

    def _follow_loader(self) -> None:
        """Give the one loader a class of its own: ``iter`` and ``next`` ask the class."""
        base: Any = type(self._loader)
        position = self
        self._class = base

        def begin(loader: Any) -> Any:
            if position._begin_restored(loader):
                return loader
            sampler = getattr(loader.data_sampler, "epoch", None)
            position._epoch = {"begin": rng.save_generators(), "first": None, "sampler": sampler, "drawn": 0}
            return base.__iter__(loader)

        def draw(loader: Any) -> Any:
            if position._restored is not None:
                if position._behind:
                    position._replay(base, loader)
                position._set_rng_once()
                position._peeked = True
            epoch = position._epoch
            if epoch["first"] is None:
                epoch["first"] = rng.save_generators()
            try:
                batch = base.__next__(loader)
            except StopIteration:
                position._restored = None
                raise
            epoch["drawn"] += 1
            return batch

        self._loader.__class__ = type(base.__name__, (base,), {"__iter__": begin, "__next__": draw})

    def _begin_restored(self, loader: Any) -> bool:
        """An epoch begins; returns whether it is the restored one, which the first draw will go through.

        As long as nothing was trained, a script that has drawn a batch only to look at it begins where it began
        before. One that begins twice and draws nothing in between has done so in the unbroken run too.
        """
        if self._restored is None:
            return False
        self._behind = self._is_under_way(loader)
        if self._behind or self._peeked:
            self._rng_is_set = self._peeked = False
        if not self._behind:
            self._set_rng_once()
        return self._behind

    def _replay(self, base: Any, loader: Any) -> None:
        """Begin the epoch that was under way once more, and skip the batches drawn."""
        assert self._restored is not None
        self._behind = False
        self._epoch = epoch = dict(self._restored["epoch"])
        if epoch["sampler"] is not None and hasattr(loader.data_sampler, "set_epoch"):
            loader.data_sampler.set_epoch(epoch["sampler"])
        if epoch["begin"] is not None:
            rng.load_generators(epoch["begin"])
        base.__iter__(loader)
        if epoch["drawn"]:
            self.tell(f"data: skipping the {epoch['drawn']} batches of this epoch that were drawn before")
            rng.load_generators(epoch["first"])
        for _ in range(epoch["drawn"]):
            base.__next__(loader)


def _nothing(*args: Any) -> None:
    """Until a state and a log are known."""


def _engine_loader(given: Any) -> Any:
    """The DeepSpeedDataLoader that an engine has made for itself, or None."""
    loader = given.loader if isinstance(given, RepeatingLoader) else given
    return loader if isinstance(loader, DeepSpeedDataLoader) else None
