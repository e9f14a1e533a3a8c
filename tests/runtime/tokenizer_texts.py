"""Varied texts on which a tokenizer has to agree with SentencePiece: languages, code, white space, emoji, odd characters."""

from __future__ import annotations

LANGUAGES = (
    "Water boils at a temperature of 100 degrees Celsius.",
    "Das Wasser kocht; die Fähre fährt um fünf Uhr über den großen Fluß.",
    "L'eau bout à 100 °C, n'est-ce pas ? « Ça dépend de l'altitude. »",
    "¿Cuándo sale el próximo transbordador? ¡Mañana, señor!",
    "Quando parte la nave? Domani mattina alle sette e mezza, però è già piena.",
    "A água ferve a cem graus; não há mais pão, só maçãs e limões.",
    "Het schip vertrekt om zes uur 's ochtends, zei de kapitein.",
    "Statek odpływa o świcie, zażółć gęślą jaźń.",
    "Loď odplouvá za úsvitu, příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Gemi şafakta kalkıyor; İstanbul'dan İzmir'e ığdır ağacı.",
    "Tàu khởi hành lúc bình minh, nước sôi ở một trăm độ.",
    "Πλοίο αναχωρεί την αυγή. Το νερό βράζει στους εκατό βαθμούς.",
    "Корабль отплывает на рассвете. Вода кипит при ста градусах.",
    "Корабель відпливає на світанку, їжак і ґедзь.",
    "الماء يغلي عند مئة درجة مئوية، والسفينة تغادر فجرا.",
    "המים רותחים במאה מעלות, והאונייה יוצאת עם שחר.",
    "پانی سو ڈگری پر ابلتا ہے۔",
    "पानी सौ डिग्री सेल्सियस पर उबलता है।",
    "জল একশ ডিগ্রিতে ফোটে।",
    "நீர் நூறு டிகிரியில் கொதிக்கிறது.",
    "నీరు వంద డిగ్రీల వద్ద మరుగుతుంది.",
    "น้ำเดือดที่หนึ่งร้อยองศา เรือออกตอนรุ่งสาง",
    "水在一百摄氏度沸腾。轮渡明天早上六点开。",
    "水在一百攝氏度沸騰，渡輪黎明出發。",
    "水は百度で沸騰する。フェリーは明け方に出る。ガギグゲゴ ﾊﾝｶｸ",
    "물은 백 도에서 끓는다. 배는 새벽에 떠난다.",
    "წყალი ას გრადუსზე დუღს.",
    "Ջուրը եռում է հարյուր աստիճանում։",
    "ውሃ በመቶ ዲግሪ ይፈላል።",
    "ទឹកពុះនៅមួយរយដឺក្រេ។",
    "Maji huchemka kwa nyuzi joto mia moja; meli inaondoka alfajiri.",
    "Vatn sýður við hundrað gráður, þó ekki á fjöllum. Ætíð ðæ.",
)
CODE = (
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "for (let i = 0; i < n; ++i) {\n\tsum += xs[i] ** 2;\n}",
    '#include <stdio.h>\nint main(void) { printf("%d\\n", 42); return 0; }',
    "SELECT name, COUNT(*) FROM ships WHERE port <> 'Hull' GROUP BY 1;",
    '{"a": [1, 2.5e-3, null, true], "b": {"c": "\\u00e9"}}',
    '<div class="x"><p>Hello &amp; goodbye</p><br/></div>',
    'fn main() { let v: Vec<u8> = vec![0; 16]; println!("{v:?}"); }',
    "$ grep -rn 'TODO' src/ | awk -F: '{print $1}' | sort -u > out.txt",
    "\\begin{align} e^{i\\pi} + 1 &= 0 \\\\ \\end{align}",
    "if x:\n        if y:\n                pass\n\n\n# end\n",
    'git commit -m "fix: don\'t mix chains" && git push --force-with-lease',
    "https://example.org/a/b?c=d&e=%20f#g mailto:someone@example.org",
    "0x7fff_ffff 1_000_000 3.14159 6.02e23 -273.15 1,234,567.89",
    "a<b>c</b> <start> <end> <|im_start|> </s> <s> [INST] [/INST] <pad",
    "| col | val |\n|-----|----:|\n| a   |   1 |\n",
)
WHITE_SPACE = (
    "", " ", "  ", "   ", "    ", " " * 7, " " * 31, " " * 33, "\n", "\n\n", "\n" * 5, "\n" * 40, "\t", "\t\t\t", "\t" * 40,
    " a", "a ", " a ", "  a  b   c    d", "a\n b\n  c", "a \n", "\r\n", "a\r\nb\rc", "\n \n \n", " \t \n\t ", "x\u00a0y\u2003z\u3000w", "\ufefftext",
    "a\u200bb\u200dc", "line\u2028separator\u2029paragraph", "\v\f\x00\x1f\x7f",
)  # fmt: skip
SYMBOLS = (
    "😀", "👩‍👩‍👧‍👦 family", "🇩🇪🇫🇷🇯🇵", "👍🏽👍🏿", "❤️ ❤", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "a😀b😀😀c", "∑∫√≤≥≠≈∞∂", "→←↑↓⇒⇔", "½⅓²³₁₂", "①②③ⅣⅧ", "™®©§¶†‡", "“quotes” ‘single’ „low“ «guillemets»",
    "e\u0301 vs é, n\u0303 vs ñ", "Å Å Å", "ﬁ ﬂ ﬀ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒮𝒸𝓇𝒾𝓅𝓉", "𐎀𐎁𐎂 𒀀𒀁 𓀀𓀁", "\U0010fffd\ue000", "a̐éö̲ Z͑ͫ̓ͪ̂ͫ̽", "the▁mark▁▁itself", "▁", "hahahahahahaha", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "================================", "----------------", "................", "!!!!!!??!?!?", "((((()))))", "l33t sp34k 4ever",
    "ALLCAPS CamelCase snake_case kebab-case dot.case", "don't can't I'll we've she's o'clock", "U.S.A. e.g. i.e. etc.", "supercalifragilisticexpialidocious",
    "Donaudampfschifffahrtsgesellschaftskapitän", "<0x41><0x0A>", "user\nmodel\nsystem",
)  # fmt: skip
TEXTS = (*LANGUAGES, *CODE, *WHITE_SPACE, *SYMBOLS)
