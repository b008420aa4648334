"""Reports as self-contained HTML pages: the page model, the charts, and a module for each report."""
