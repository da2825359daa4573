"""Sphinx's configuration: Markdown pages, one theme, nothing fetched from elsewhere."""

project = "daop"
author = "the authors of daop"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "daop"
html_show_copyright = False
html_copy_source = False
myst_heading_anchors = 3
exclude_patterns = ["conf.py"]
