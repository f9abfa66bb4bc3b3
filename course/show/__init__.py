"""Pictures and tables of what the lenses see, for notebooks, pages and terminals."""

from course.show.pictures import memory_svg, side_by_side, timeline_svg

__all__ = ["memory_svg", "side_by_side", "timeline_svg"]
