//! Changes to a template's source where this renderer's language differs from jinja2's.

use std::sync::LazyLock;

use fancy_regex::Regex;

/// A string that is marked safe and joined with another, which jinja2 then escapes.
static SAFE_IN_SUM: LazyLock<Regex> = LazyLock::new(|| {
    let operand = r#"(?:"[^"]*"|'[^']*'|[\w.\[\]'"]+)"#;
    let pattern = format!(r"[+~]\s*{operand}\s*\|\s*safe\b|\|\s*safe\b(?=\s*[+~])");
    Regex::new(&pattern).expect("a constant expression")
});

/// Turns `{% generation %}` blocks, which only mark what an assistant wrote, into blocks that do nothing, and has what a
/// loop goes over checked as Python would.
pub(super) fn adapt(source: &str) -> String {
    let mut out = String::with_capacity(source.len() + source.len() / 16);
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let length = match rest.as_bytes().get(1) {
            Some(b'#') => rest.find("#}").map(|end| end + 2),
            Some(b'{') => end_of(rest, "}}"),
            Some(b'%') => end_of(rest, "%}"),
            _ => Some(1),
        };
        // Not closed: the parser will say so.
        let length = length.unwrap_or(rest.len());
        let (mut tag, mut after) = rest.split_at(length);
        let words = words(tag);
        if tag.starts_with("{%") && words == "raw" {
            let end = after.find("endraw").unwrap_or(after.len());
            (tag, after) = rest.split_at(length + end);
            out.push_str(tag);
        } else if tag.starts_with("{%") && words == "generation" {
            out.push_str(&tag.replacen("generation", "if true", 1));
        } else if tag.starts_with("{%") && words == "endgeneration" {
            out.push_str(&tag.replacen("endgeneration", "endif", 1));
        } else if let Some((start, end)) = loop_source(tag) {
            out.extend([&tag[..start], " (", tag[start..end].trim(), ")|_looped ", &tag[end..]]);
        } else if length > 1 && !tag.starts_with("{#") && SAFE_IN_SUM.is_match(tag).unwrap_or(false) {
            out.push_str(&SAFE_IN_SUM.replace_all(tag, "$0|_markup_sum "));
        } else {
            out.push_str(tag);
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// What is between `{%` and `%}`.
fn words(tag: &str) -> &str {
    let inside = tag.strip_prefix("{%").and_then(|tag| tag.strip_suffix("%}")).unwrap_or("");
    inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim()
}

/// Bytes of a tag up to and with `close`, which does not count within a string.
fn end_of(tag: &str, close: &str) -> Option<usize> {
    let mut at = 2;
    while at < tag.len() {
        let rest = &tag[at..];
        if rest.starts_with(close) {
            return Some(at + close.len());
        }
        at += step(rest);
    }
    None
}

/// Bytes of the string or else the character that `text` begins with.
fn step(text: &str) -> usize {
    let mut chars = text.char_indices();
    match chars.next() {
        Some((_, quote @ ('"' | '\''))) => {
            let mut escaped = false;
            for (at, c) in chars {
                if !escaped && c == quote {
                    return at + 1;
                }
                escaped = !escaped && c == '\\';
            }
            text.len()
        }
        Some((_, c)) => c.len_utf8(),
        None => 0,
    }
}

/// Of the tag of a loop: from where to where what it goes over stands.
fn loop_source(tag: &str) -> Option<(usize, usize)> {
    let body = words(tag);
    let target = body.strip_prefix("for")?;
    if !target.starts_with(char::is_whitespace) {
        return None;
    }
    let first =
        tag.len() - tag.trim_start_matches("{%").trim_start_matches(['-', '+']).trim_start().len() + 3;
    let last = first + target.len();
    let mut start = None;
    let mut depth = 0;
    let mut at = first;
    while at < last {
        let rest = &tag[at..last];
        match rest.as_bytes()[0] {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth -= 1,
            byte if depth == 0 && (byte.is_ascii_alphabetic() || byte == b'_') => {
                let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
                match (&rest[..length], start) {
                    ("in", None) => start = Some(at + 2),
                    ("if" | "recursive", Some(start)) => return Some((start, at)),
                    _ => {}
                }
                at += length;
                continue;
            }
            _ => {}
        }
        at += step(rest);
    }
    start.map(|start| (start, last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_and_generation_blocks_are_adapted_where_they_are_tags() {
        for (source, expected) in [
            ("{%- for m in messages -%}", "{%- for m in (messages)|_looped -%}"),
            (
                "{% for k, v in a['if in']|items if k in v %}",
                "{% for k, v in (a['if in']|items)|_looped if k in v %}",
            ),
            ("{% for x in f(y if z) recursive %}", "{% for x in (f(y if z))|_looped recursive %}"),
            ("{% for x in 1, 2 %}{% format %}", "{% for x in (1, 2)|_looped %}{% format %}"),
            ("{%+ generation -%}x{% endgeneration +%}", "{%+ if true -%}x{% endif +%}"),
            (
                "{# {% generation %} #}{{ '{% generation %}' }}",
                "{# {% generation %} #}{{ '{% generation %}' }}",
            ),
            (
                "{% raw %}{% for a in b %}{% endraw %}{%generation%}",
                "{% raw %}{% for a in b %}{% endraw %}{%if true%}",
            ),
            ("{{ 'a'|safe + b ~ c | safe }}", "{{ 'a'|safe|_markup_sum + b ~ c | safe|_markup_sum }}"),
            ("{{ (a + b)|safe }}", "{{ (a + b)|safe }}"),
            ("{ {%", "{ {%"),
            ("{% set x = '%}' %}{% set generation = 1 %}", "{% set x = '%}' %}{% set generation = 1 %}"),
        ] {
            let spaced = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
            assert_eq!(spaced(&adapt(source)), spaced(expected));
        }
    }
}
