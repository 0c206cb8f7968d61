"""Watchers hear of every change once, and cannot hurt whom they watch."""

from __future__ import annotations

from lorafleet.engine.snapshot import ResidencySnapshot, Snapshots


def test_only_news_is_told_and_each_has_the_next_number() -> None:
    snapshots, heard = Snapshots(), list[ResidencySnapshot]()
    snapshots.subscribe(heard.append)
    snapshots.publish(ResidencySnapshot(running=1))
    snapshots.publish(ResidencySnapshot(running=1))
    snapshots.publish(ResidencySnapshot(running=2, resident=("a",)))
    assert [(s.sequence, s.running) for s in heard] == [(1, 1), (2, 2)]
    assert snapshots.newest is heard[-1]


def test_who_has_left_hears_nothing_and_may_leave_twice() -> None:
    snapshots, heard = Snapshots(), list[ResidencySnapshot]()
    leave = snapshots.subscribe(heard.append)
    leave()
    leave()
    snapshots.publish(ResidencySnapshot(running=1))
    assert not heard


def test_a_watcher_that_fails_disturbs_no_other() -> None:
    snapshots, heard = Snapshots(), list[ResidencySnapshot]()

    def fails(snapshot: ResidencySnapshot) -> None:
        raise RuntimeError("Event loop is closed")

    snapshots.subscribe(fails)
    snapshots.subscribe(heard.append)
    snapshots.publish(ResidencySnapshot(running=1))
    assert len(heard) == 1
