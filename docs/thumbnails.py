"""Thumbnails of the gallery: the first panel of a figure of several, so that it can be read."""

import tempfile
from pathlib import Path

from matplotlib import pyplot as plt
from sphinx_gallery.scrapers import matplotlib_scraper

# Figures with more panels than this are shown whole: each panel says little by itself.
_MOST = 4
_found = {}


def scrape(block, block_vars, gallery_conf):
    """Save the figures of a block, and the first panel of the first figure of an example."""
    name = Path(block_vars["src_file"]).stem
    if name not in _found and plt.get_fignums():
        figure = plt.figure(plt.get_fignums()[0])
        panels = [ax for ax in figure.axes if ax.get_xlabel() or ax.get_title(loc="left")]
        if 1 < len(panels) <= _MOST:
            figure.canvas.draw()  # which places the panels
            box = panels[0].get_tightbbox().transformed(figure.dpi_scale_trans.inverted())
            _found[name] = Path(tempfile.mkdtemp()) / "thumbnail.png"
            figure.savefig(_found[name], dpi=160, bbox_inches=box.padded(0.06))
        else:
            _found[name] = None
    return matplotlib_scraper(block, block_vars, gallery_conf)


def replace(app):
    """Put what was saved in the place of the thumbnails that the gallery has made."""
    for name, path in _found.items():
        thumbnail = Path(app.srcdir, "gallery", "images", "thumb", f"sphx_glr_{name}_thumb.png")
        if path is not None:
            thumbnail.write_bytes(path.read_bytes())
