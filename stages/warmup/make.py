"""Makes the starter policy of a configuration as a HF folder that appears complete or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from conf.schema import LibraConfig
from stages.files import fsync_path, fsync_paths, list_names, make_directory
from stages.warmup.errors import WarmupBusyError, WarmupError
from stages.warmup.key import cached_policy_path, damage, warmup_key

LOCK_TIMEOUT_S = 1800.0
LOCK_POLL_S = 0.2
STREAM_OFFSET = 1_000_000
"""Added to warmup.seed: the labelled problems come from another stream than those that a run of the same seed asks."""


def ensure_policy(config: LibraConfig, folder: Path) -> bool:
    """Make the policy in `folder` unless it is there; returns whether it was made now.

    Two processes at once: one makes it, the other waits for it. Where files can not be locked both make it, and the
    first rename wins. Raises WarmupError, TaskError, WarmupBusyError.
    """
    if config.warmup.steps < 1:
        raise WarmupError(
            "warmup.steps is 0: there is nothing to make; set model_path to an existing HF folder instead"
        )
    make_directory(folder.parent)
    with _lock(folder.with_name(f".{folder.name}.lock")):
        if folder.name in list_names(folder.parent):
            if not (why := damage(folder)):
                return False
            _discard(config, folder, why)
        temporary = folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(4)}")
        try:
            _make(config, make_directory(temporary))
            _publish(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return True


def _discard(config: LibraConfig, folder: Path, why: str) -> None:
    """Make room for a whole policy. Raises WarmupError for a folder that is not one of the cache's own."""
    if folder.name != cached_policy_path(config, folder.parent).name:
        raise WarmupError(
            f"model_path={folder} cannot be used ({why}), and is not ours to replace; remove or change it"
        )
    print(f"warm-up: {folder} is damaged ({why}): making it again", flush=True)
    trash = folder.with_name(f".{folder.name}.trash-{secrets.token_hex(4)}")
    os.rename(folder, trash)
    shutil.rmtree(trash)


def _make(config: LibraConfig, folder: Path) -> None:
    from stages.controller.tasks import make_task
    from stages.warmup import policy, supervised, vocabulary
    from stages.warmup.answering import mean_reward

    options = config.warmup
    task = make_task(config.task, seed=STREAM_OFFSET + options.seed)
    if task.chat:
        raise WarmupError("task.params.chat needs a chat template, which the made tokenizer does not have")
    tokenizer = vocabulary.build_tokenizer(options.alphabet, options.phrases)
    model = policy.make_policy(config.model, vocabulary=tokenizer.get_vocab_size(), seed=options.seed)
    print(f"warm-up: {model.num_parameters():,} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    batches, apart = supervised.labelled_data(task, tokenizer, options)
    progress: list[supervised.Progress] = []

    def report(now: supervised.Progress) -> None:
        progress.append(now)
        reward = "" if now.reward is None else f" reward {now.reward:.3f} of {options.target_reward:.3f}"
        print(f"warm-up: step {now.step}/{options.steps} loss {now.loss:.4f}{reward} {now.seconds:.1f} s", flush=True)

    def reward() -> float:
        return mean_reward(model, tokenizer, task, apart, max_tokens=config.max_new_tokens)

    supervised.train(model, batches, options, reward, report)
    model.save_pretrained(folder)
    vocabulary.save_tokenizer(tokenizer, folder, max_length=config.model.max_position_embeddings)
    record = {"key": warmup_key(config), **asdict(progress[-1])}
    (folder / "warmup.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _publish(temporary: Path, folder: Path) -> None:
    fsync_paths([*(temporary / name for name in list_names(temporary)), temporary])
    try:
        os.rename(temporary, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        # Another process was faster; its policy is made from the same options.
    fsync_path(folder.parent)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel drops it when the holder dies. Raises WarmupBusyError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _acquire(fd, path)
        yield
    finally:
        os.close(fd)


def _acquire(fd: int, path: Path) -> None:
    started, announced = time.monotonic(), False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not announced:
                announced = True
                print(f"warm-up: another process is making this policy; waiting ({path})", flush=True)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                return  # a filesystem without locks (Lustre mounted without flock)
            raise
        else:
            return
        if time.monotonic() - started > LOCK_TIMEOUT_S:
            raise WarmupBusyError(f"waited {LOCK_TIMEOUT_S:.0f} s for {path}: its holder is still making the policy")
        time.sleep(LOCK_POLL_S)
