"""Workers that reach the master and not each other: the user is told once, with what to look at."""

from instep.control.parted import MOST_APART, Parted


def test_the_user_is_told_once_that_groups_do_not_last_and_again_after_a_commit():
    parted, said = Parted(), []
    for committed in (3, 7):
        parted.note(f"no way from {committed}.")
        said.append([parted.look(committed, committed + n) for n in range(2 * MOST_APART)])
    for texts, committed in zip(said, (3, 7), strict=True):
        assert [bool(text) for text in texts] == [n == MOST_APART for n in range(2 * MOST_APART)]
        assert f"come apart 3 times since the last step (no way from {committed})," in texts[3]
        assert "all ports between their hosts have to be open" in texts[3]


def test_a_first_group_that_does_not_form_is_for_others_to_tell():
    parted = Parted()
    assert not any(parted.look(0, broken) for broken in range(100))


def test_groups_that_come_apart_with_steps_in_between_are_nothing_to_tell():
    parted = Parted()
    assert not any(parted.look(step, step) for step in range(100))
