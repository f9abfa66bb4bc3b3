"""Pictures and tables of analysis results, for notebooks, pages and terminals."""

from course.render.pictures import memory_svg, side_by_side, timeline_svg
from course.render.schedules import schedule_svg
from course.render.shardings import Holdings, holdings_svg, holdings_table, who_holds

__all__ = [
    "Holdings",
    "holdings_svg",
    "holdings_table",
    "memory_svg",
    "schedule_svg",
    "side_by_side",
    "timeline_svg",
    "who_holds",
]
