"""Where a job's files are on this host."""

from instep.system.environment import RECIPE, places_here, recipe_here


def test_the_python_path_follows_the_recipe_into_a_copy_of_its_folder(tmp_path, monkeypatch):
    job, copy = "/home/anna/digits/net.py:recipe", tmp_path / "package"
    places = ["/home/anna/digits", "/home/anna/digits/lib", "/home/anna/digits/gone", "/opt/shared"]
    assert places_here(job, places) == tuple(places)
    (copy / "lib").mkdir(parents=True)
    monkeypatch.setenv(RECIPE, str(copy / "net.py"))
    assert recipe_here(job) == f"{copy}/net.py:recipe"
    assert places_here(job, places) == (str(copy), str(copy / "lib"), *places[2:])
