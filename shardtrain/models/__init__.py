"""Models that name their axes and know no mesh."""
