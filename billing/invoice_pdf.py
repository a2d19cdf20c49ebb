"""An invoice as a PDF: A4, its header on every page, lines that wrap, names in any of the common scripts.

Latin, Greek and Cyrillic letters are set in Roboto, whose outlines go into the file. Chinese, Japanese and Korean ones
are set in Adobe's standard fonts for them, which a PDF names and a viewer brings.
"""

from collections.abc import Callable
from decimal import Decimal
from io import BytesIO
from itertools import groupby
from typing import Any
from xml.sax.saxutils import escape

import font_roboto
from reportlab.lib.colors import HexColor
from reportlab.lib.enums import TA_RIGHT
from reportlab.lib.pagesizes import A4
from reportlab.lib.styles import ParagraphStyle
from reportlab.lib.units import mm
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.cidfonts import UnicodeCIDFont
from reportlab.pdfbase.ttfonts import TTFont
from reportlab.pdfgen.canvas import Canvas
from reportlab.platypus import BaseDocTemplate, Frame, KeepTogether, PageTemplate, Paragraph, Spacer, Table, TableStyle

from billing.invoices import Invoice

TAX_NOTE = "Amounts are net. Taxes, where any are due, are not included."

_INK, _GREY, _LINE, _SHADE = HexColor("#1c2530"), HexColor("#667281"), HexColor("#cdd4dc"), HexColor("#f3f5f8")
_MARGIN = 18 * mm
_WIDTH = A4[0] - 2 * _MARGIN
_COLUMNS = [_WIDTH * share for share in (0.44, 0.18, 0.20, 0.18)]
_SANS, _BOLD = "Roboto", "Roboto-Bold"
_CHINESE, _JAPANESE, _KOREAN = "STSong-Light", "HeiseiMin-W3", "HYGothic-Medium"
_LETTERS: dict[str, set[int]] = {}


def invoice_pdf(invoice: Invoice) -> bytes:
    """A4 pages, ready to send."""
    _register()
    out = BytesIO()
    header = 30 * mm
    frame = Frame(_MARGIN, _MARGIN, _WIDTH, A4[1] - 2 * _MARGIN - header, 0, 0, 0, 0, id="body")
    document = BaseDocTemplate(
        out,
        pagesize=A4,
        title=f"Invoice {invoice.label}",
        author=invoice.issuer.partition("\n")[0],
        subject=f"{invoice.customer}, {invoice.month}",
        lang="en",
    )
    document.addPageTemplates(PageTemplate(id="page", frames=[frame], onPage=_header(invoice)))
    document.build(
        [*_parties(invoice), _lines(invoice), Spacer(1, 5 * mm), KeepTogether(_end(invoice))], canvasmaker=_Numbered
    )
    return out.getvalue()


def _register() -> None:
    if _LETTERS:
        return
    for name, file in ((_SANS, "Roboto"), (_BOLD, "RobotoBold")):
        font = TTFont(name, font_roboto.font_files[file])
        pdfmetrics.registerFont(font)
        _LETTERS[name] = set(font.face.charToGlyph)
    pdfmetrics.registerFontFamily(_SANS, normal=_SANS, bold=_BOLD, italic=_SANS, boldItalic=_BOLD)
    for name in (_CHINESE, _JAPANESE, _KOREAN):
        pdfmetrics.registerFont(UnicodeCIDFont(name))


class _Numbered(Canvas):  # type: ignore[misc]
    """Writes "page 2 of 3" when it knows how many there are."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._pages: list[dict[str, Any]] = []

    def showPage(self) -> None:  # noqa: N802 - reportlab's name
        self._pages.append(dict(self.__dict__))
        self._startPage()

    def save(self) -> None:
        for number, page in enumerate(self._pages, 1):
            self.__dict__.update(page)
            self.setFont(_SANS, 8)
            self.setFillColor(_GREY)
            self.drawRightString(A4[0] - _MARGIN, 10 * mm, f"page {number} of {len(self._pages)}")
            super().showPage()
        super().save()


def _header(invoice: Invoice) -> Callable[[Canvas, BaseDocTemplate], None]:
    def draw(canvas: Canvas, document: BaseDocTemplate) -> None:
        top = A4[1] - _MARGIN
        canvas.saveState()
        canvas.setFillColor(_INK)
        canvas.setFont(_BOLD, 20)
        canvas.drawString(_MARGIN, top - 16, "Invoice")
        left = Paragraph(
            f"<b>{invoice.label}</b><br/>issued {invoice.issued_at:%Y-%m-%d}<br/>"
            f"usage of {invoice.month}, on the clock of {_marked(invoice.time_zone)}",
            _style(9, leading=12, alignment=TA_RIGHT),
        )
        _, height = left.wrap(_WIDTH * 0.6, 40 * mm)
        left.drawOn(canvas, _MARGIN + _WIDTH * 0.4, top - height)
        canvas.setStrokeColor(_INK)
        canvas.setLineWidth(1.2)
        canvas.line(_MARGIN, top - 20 * mm, A4[0] - _MARGIN, top - 20 * mm)
        if invoice.voided_at is not None:
            canvas.setFillColor(HexColor("#b3261e"))
            canvas.setFont(_BOLD, 20)
            canvas.drawString(_MARGIN + 32 * mm, top - 16, "VOID")
        canvas.restoreState()

    return draw


def _parties(invoice: Invoice) -> list[Any]:
    small, plain = _style(8, colour=_GREY), _style(10, leading=14)
    columns = []
    bill_to = "\n".join(filter(None, (invoice.customer, invoice.bill_to)))
    for title, words in (("From", invoice.issuer), ("To", bill_to)):
        if words:
            columns.append([Paragraph(title, small), Paragraph(_marked(words), plain)])
    table = Table([columns], colWidths=[_WIDTH / 2] * len(columns), hAlign="LEFT")
    table.setStyle(TableStyle([("VALIGN", (0, 0), (-1, -1), "TOP"), ("LEFTPADDING", (0, 0), (-1, -1), 0)]))
    parts: list[Any] = [table, Spacer(1, 6 * mm)]
    if invoice.voided_at is not None:
        words = f"Void since {invoice.voided_at:%Y-%m-%d}: {invoice.void_reason}"
        parts += [Paragraph(_marked(words), _style(10, colour=HexColor("#b3261e"))), Spacer(1, 4 * mm)]
    return parts


def _lines(invoice: Invoice) -> Table:
    cell, number = _style(9, leading=12), _style(9, leading=12, alignment=TA_RIGHT)
    head, head_number = _style(8, colour=_GREY), _style(8, colour=_GREY, alignment=TA_RIGHT)
    rows = [
        [
            Paragraph("Description", head),
            Paragraph("Quantity", head_number),
            Paragraph("Unit price", head_number),
            Paragraph(f"Amount, {_marked(invoice.currency)}", head_number),
        ]
    ]
    for line in invoice.lines:
        price = (
            "" if line.unit_price is None else f"{_grouped(line.unit_price)}{_PER.get(line.per, f' / {line.per:,}')}"
        )
        rows.append(
            [
                Paragraph(_marked(line.description), cell),
                Paragraph(f"{_grouped(line.quantity)} {line.unit}", number),
                Paragraph(price, number),
                Paragraph(f"{line.amount:,f}", number),
            ]
        )
    table = Table(rows, colWidths=_COLUMNS, repeatRows=1, splitByRow=1)
    table.setStyle(
        TableStyle(
            [
                ("VALIGN", (0, 0), (-1, -1), "TOP"),
                ("LINEBELOW", (0, 0), (-1, 0), 0.8, _INK),
                ("LINEBELOW", (0, 1), (-1, -1), 0.4, _LINE),
                ("TOPPADDING", (0, 0), (-1, -1), 4),
                ("BOTTOMPADDING", (0, 0), (-1, -1), 5),
                ("LEFTPADDING", (0, 0), (0, -1), 0),
                ("RIGHTPADDING", (-1, 0), (-1, -1), 0),
            ]
        )
    )
    return table


_PER = {1: "", 1_000_000: " / million"}


def _end(invoice: Invoice) -> list[Any]:
    bold = _style(12, font=_BOLD)
    total = Table(
        [[Paragraph("Total", bold), Paragraph(f"{invoice.total:,f} {_marked(invoice.currency)}", _right(bold))]],
        colWidths=[_WIDTH * 0.25, _WIDTH * 0.3],
        hAlign="RIGHT",
    )
    total.setStyle(TableStyle([("BACKGROUND", (0, 0), (-1, -1), _SHADE), ("BOTTOMPADDING", (0, 0), (-1, -1), 6)]))
    notes = [TAX_NOTE, "Each line is rounded once, half to even, to the currency's smallest coin."]
    if invoice.unknown:
        notes.append(
            f"{invoice.unknown:,} requests of the month had no price when they were answered; they are not on this "
            "invoice and would come on a later one."
        )
    return [total, Spacer(1, 6 * mm), *(Paragraph(note, _style(8, colour=_GREY, leading=11)) for note in notes)]


def _right(style: ParagraphStyle) -> ParagraphStyle:
    return ParagraphStyle("right", parent=style, alignment=TA_RIGHT)


def _style(
    size: float, *, leading: float | None = None, colour: Any = _INK, alignment: int = 0, font: str = _SANS
) -> ParagraphStyle:
    return ParagraphStyle(
        "style",
        fontName=font,
        fontSize=size,
        leading=leading or size * 1.3,
        textColor=colour,
        alignment=alignment,
        splitLongWords=1,
    )


def _grouped(amount: Decimal) -> str:
    """Every digit, thousands apart."""
    shown = f"{amount:,f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def _marked(words: str) -> str:
    """For a Paragraph: what Roboto has not is set in the font that has it."""
    runs = (("".join(run), font) for font, run in groupby(words, key=_font))
    marked = (escape(run) if font is None else f'<font face="{font}">{escape(run)}</font>' for run, font in runs)
    return "".join(marked).replace("\n", "<br/>")


def _font(letter: str) -> str | None:
    code = ord(letter)
    if code in _LETTERS[_SANS] or letter.isspace():
        return None
    if 0xAC00 <= code <= 0xD7AF or 0x1100 <= code <= 0x11FF or 0x3130 <= code <= 0x318F:
        return _KOREAN
    return _JAPANESE if 0x3040 <= code <= 0x30FF else _CHINESE
