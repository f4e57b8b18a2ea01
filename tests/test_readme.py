import re
from pathlib import Path

REPO = Path(__file__).parents[1]


def test_the_python_example_runs(capsys):
    (program,) = re.findall(r"```python\n(.*?)```", (REPO / "README.md").read_text(), flags=re.DOTALL)
    exec(compile(program, "README.md", "exec"), {})
    assert "DecodeForm.GROUPED" in capsys.readouterr().out


def test_links_lead_somewhere():
    for page in [REPO / "README.md", *(REPO / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"
