"""The strip of an episode says what the episode said."""

from __future__ import annotations

from matplotlib.colors import to_hex

from composer_nb.drills.episode_picture import FAULTY, RIGHT, STATE, boxes_of, draw
from composer_nb.tasks.arithmetic import Arithmetic
from composer_nb.tasks.contract import Turn, run

RIGHT_TURN = Turn("List it.", "ls", None, "a.txt", None)


def test_boxes_stand_in_the_episodes_order_and_a_fault_shows_its_hint() -> None:
    family = Arithmetic(steps=(1,))
    task = family.tasks("train", 1)[0]
    wrong = run(family, task, ["I am sure."]).turns[0]
    boxes = boxes_of([RIGHT_TURN, wrong], family.hints, "plan", "one", "two")
    assert [box.colour for box in boxes] == [STATE, RIGHT, FAULTY, STATE]
    assert [box.title for box in boxes] == ["before", "List it.", wrong.request, "after"]
    assert boxes[1].text == "> ls\na.txt"
    assert boxes[2].text.endswith(f"hint: {family.hints(wrong)['plan']}")
    assert "hint" not in boxes_of([wrong], family.hints, "none of these")[0].text


def test_drawing_shows_every_word_and_grows_with_the_text() -> None:
    low, high = (
        draw(boxes_of([RIGHT_TURN])),
        draw(boxes_of([RIGHT_TURN], before="\n".join("abcdefghijklmnop"))),
    )
    shown = [text.get_text() for ax in high.axes for text in ax.texts]
    assert shown == ["\n".join("abcdefghijklmnop"), "> ls\na.txt"]
    assert [ax.get_title() for ax in high.axes] == ["before", "List it."]
    assert [to_hex(ax.get_facecolor()) for ax in high.axes] == [to_hex(STATE), RIGHT]
    assert high.get_figheight() > low.get_figheight()
