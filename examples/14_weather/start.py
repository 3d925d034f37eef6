"""Copy the raw data that this example prepares: python examples/14_weather/start.py

Four years of weather in Seattle, a row for each day, as the package vega_datasets ships it.
"""

import shutil
import sys
from pathlib import Path

import vega_datasets

to = Path(sys.argv[1] if len(sys.argv) > 1 else "data/weather")
to.mkdir(parents=True, exist_ok=True)
shutil.copy(Path(vega_datasets.__file__).parent / "_data" / "seattle-weather.csv", to)
print(f"raw data   {to / 'seattle-weather.csv'}")
