//! What templates expect of Python: `json.dumps` as a filter, and dates as `strftime` writes them.

use std::borrow::Cow;
use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, filters};

type Result<T> = std::result::Result<T, Error>;

/// Gives an environment what templates expect of Python and of jinja2, where minijinja's own differs.
pub(super) fn add_to(environment: &mut Environment) {
    environment.add_filter("tojson", tojson);
    environment.add_filter("_looped", looped);
    environment.add_filter("_markup_sum", |_: Value| -> Result<Value> {
        Err(problem("a string marked safe is joined with another, which is not supported".into()))
    });
    environment.set_formatter(|out, _, value| {
        if !value.is_undefined() {
            out.write_str(&text(value)?)?;
        }
        Ok(())
    });
    environment.add_filter("string", |value: Value| -> Result<Value> {
        if value.kind() == ValueKind::String { Ok(value) } else { text(&value).map(Value::from) }
    });
    for name in ["escape", "e"] {
        environment.add_filter(name, |value: &Value| escape(&value.to_string()));
    }
    // An attribute in Python's sense; an entry of an object is none.
    environment.add_filter("attr", |_: Value, _: Value| Value::UNDEFINED);
    // jinja2's are generators: always true, gone through once, without a length, and no JSON.
    environment.add_filter("select", |state: &mut State, value, test: Option<Cow<str>>, rest: Rest<_>| {
        filters::select(state, value, test, rest).map(generator)
    });
    environment.add_filter("reject", |state: &mut State, value, test: Option<Cow<str>>, rest: Rest<_>| {
        filters::reject(state, value, test, rest).map(generator)
    });
    environment.add_filter(
        "selectattr",
        |state: &mut State, value, name: Cow<str>, test: Option<Cow<str>>, rest: Rest<_>| {
            filters::selectattr(state, value, name, test, rest).map(generator)
        },
    );
    environment.add_filter(
        "rejectattr",
        |state: &mut State, value, name: Cow<str>, test: Option<Cow<str>>, rest: Rest<_>| {
            filters::rejectattr(state, value, name, test, rest).map(generator)
        },
    );
    environment.add_filter("map", |state: &mut State, value, rest: Rest<_>| {
        filters::map(state, value, rest).map(generator)
    });
    environment.add_test("iterable", |value: &Value| {
        use ValueKind::{Bool, None, Number, Plain};
        !matches!(value.kind(), Bool | None | Number | Plain)
    });
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map)
    });
    environment
        .add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
}

/// `str(value)`
fn text(value: &Value) -> Result<Cow<'_, str>> {
    match value.kind() {
        ValueKind::String => Ok(value.as_str().unwrap_or_default().into()),
        ValueKind::Number if !value.is_integer() => Ok(number(value).into()),
        ValueKind::Iterable => Err(problem("a generator is printed".into())),
        ValueKind::Seq | ValueKind::Map => {
            check_printed(value, 0)?;
            Ok(value.to_string().into())
        }
        ValueKind::Invalid => value.try_iter().map(|_| "".into()),
        _ => Ok(value.to_string().into()),
    }
}

/// Refuses what is printed otherwise within a list or an object than Python would: numbers with an exponent.
fn check_printed(value: &Value, depth: usize) -> Result<()> {
    match value.kind() {
        ValueKind::Number if !value.is_integer() && number(value) != value.to_string() => {
            Err(problem(format!("the number {} within a printed list or object", number(value))))
        }
        ValueKind::Seq | ValueKind::Map if depth < 200 => {
            for item in value.try_iter()? {
                let inner = if value.kind() == ValueKind::Map { value.get_item(&item)? } else { item };
                check_printed(&inner, depth + 1)?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

fn generator(values: Vec<Value>) -> Value {
    Value::make_one_shot_iterator(values.into_iter())
}

/// What a loop goes over: Python has no empty loop over `None`.
fn looped(value: Value) -> Result<Value> {
    match value.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
            Err(problem(format!("a loop over {value}, which is not iterable")))
        }
        _ => Ok(value),
    }
}

/// As markupsafe escapes.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    out
}

/// The filter `tojson` as transformers defines it: `json.dumps` with `ensure_ascii=False`.
pub(super) fn tojson(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<String> {
    const NAMES: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];
    if positional.len() > NAMES.len() {
        return Err(problem("tojson takes at most 4 arguments".into()));
    }
    let mut arguments = [const { None }; NAMES.len()];
    for ((index, name), argument) in NAMES.iter().enumerate().zip(&mut arguments) {
        let by_name: Option<Value> = named.get(name)?;
        if by_name.is_some() && index < positional.len() {
            return Err(problem(format!("tojson got several values for {name}")));
        }
        *argument = positional.get(index).cloned().or(by_name);
    }
    named.assert_all_used()?;
    let [ascii, indent, separators, sort] = arguments;
    let truth = |argument: Option<Value>| argument.is_some_and(|value| value.is_true());
    let indent = match indent {
        None => None,
        Some(value) if value.is_none() => None,
        Some(value) => match (value.as_str(), value.as_i64()) {
            (Some(text), _) => Some(text.to_string()),
            (None, Some(width)) => Some(" ".repeat(usize::try_from(width).unwrap_or(0).min(1024))),
            // Python takes a truth value for the number that it is.
            (None, None) if value.kind() == ValueKind::Bool => Some(" ".repeat(value.is_true().into())),
            (None, None) => return Err(problem(format!("tojson: indent is {value}"))),
        },
    };
    let (item, key) = match separators.filter(|value| !value.is_none()) {
        None => (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()),
        Some(value) => {
            let parts: Vec<Value> = value.try_iter()?.collect();
            match parts.as_slice() {
                [item, key] if item.as_str().is_some() && key.as_str().is_some() => {
                    (item.to_string(), key.to_string())
                }
                _ => return Err(problem(format!("tojson: separators are {value}, expected two strings"))),
            }
        }
    };
    let style = Style { ascii: truth(ascii), indent, item, key, sort: truth(sort) };
    let mut out = String::new();
    style.write(value, 0, &mut out)?;
    Ok(out)
}

struct Style {
    ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort: bool,
}

impl Style {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<()> {
        if depth > 200 {
            return Err(problem("tojson: a value that is nested too deeply".into()));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.items(&items, ('[', ']'), depth, out, |item, out| self.write(item, depth + 1, out))?;
            }
            ValueKind::Map => {
                let mut pairs = Vec::new();
                for key in value.try_iter()? {
                    let entry = value.get_item(&key)?;
                    pairs.push((key_text(&key)?, entry));
                }
                if self.sort {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.items(&pairs, ('{', '}'), depth, out, |(key, entry), out| {
                    self.string(key, out);
                    out.push_str(&self.key);
                    self.write(entry, depth + 1, out)
                })?;
            }
            ValueKind::Invalid => value.try_iter().map(drop)?,
            kind => return Err(problem(format!("tojson: a value of kind {kind} cannot be written as JSON"))),
        }
        Ok(())
    }

    fn items<T>(
        &self,
        items: &[T],
        (open, close): (char, char),
        depth: usize,
        out: &mut String,
        mut write: impl FnMut(&T, &mut String) -> Result<()>,
    ) -> Result<()> {
        out.push(open);
        let line = |depth: usize, out: &mut String| {
            if let (Some(indent), false) = (&self.indent, items.is_empty()) {
                out.push('\n');
                out.push_str(&indent.repeat(depth));
            }
        };
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item);
            }
            line(depth + 1, out);
            write(item, out)?;
        }
        line(depth, out);
        out.push(close);
        Ok(())
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// A key of an object: JSON has only strings.
fn key_text(key: &Value) -> Result<String> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_string()),
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
        ValueKind::Number => Ok(number(key)),
        kind => Err(problem(format!("tojson: a key of kind {kind}"))),
    }
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(number) => float(number),
        Err(_) => value.to_string(),
    }
}

/// A number as Python's `float.__repr__` writes it, and JSON's names for what is not finite.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    let size = value.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{value:?}")
}

fn problem(text: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, text)
}

/// A point in time in a proleptic Gregorian calendar, to the second, without a time zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Date {
    days: i64,
    seconds: i64,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl Date {
    /// Now, in UTC.
    pub fn now() -> Date {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let seconds = since.map_or(0, |since| since.as_secs() as i64);
        Date { days: seconds.div_euclid(86400), seconds: seconds.rem_euclid(86400) }
    }

    /// Reads `2026-12-07` or `2026-12-07T10:30:00`.
    pub fn parse(text: &str) -> Option<Date> {
        let (date, time) = text.split_once('T').unwrap_or((text, "00:00:00"));
        let numbers = |text: &str, separator: char, widths: [usize; 3]| -> Option<[i64; 3]> {
            let parts: Vec<&str> = text.split(separator).collect();
            let good = parts
                .iter()
                .zip(widths)
                .all(|(part, width)| part.len() == width && part.bytes().all(|byte| byte.is_ascii_digit()));
            let numbers: Vec<i64> = parts.iter().filter_map(|part| part.parse().ok()).collect();
            numbers.try_into().ok().filter(|_| good)
        };
        let [year, month, day] = numbers(date, '-', [4, 2, 2])?;
        let [hour, minute, second] = numbers(time, ':', [2, 2, 2])?;
        let days = days_of(year, month, day);
        let found = Date { days, seconds: hour * 3600 + minute * 60 + second };
        let exists = year >= 1 && (1..=12).contains(&month) && found.civil() == (year, month, day);
        (exists && hour < 24 && minute < 60 && second < 60).then_some(found)
    }

    /// Year, month and day.
    fn civil(self) -> (i64, i64, i64) {
        // Years that begin in March: the leap day is their last.
        let days = self.days + 719_468;
        let era = days.div_euclid(146_097);
        let of_era = days.rem_euclid(146_097);
        let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year + year / 4 - year / 100);
        let shifted = (5 * of_year + 2) / 153;
        let day = of_year - (153 * shifted + 2) / 5 + 1;
        let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
        (year + era * 400 + i64::from(month <= 2), month, day)
    }

    /// Writes the date by a format of Python's `strftime`.
    pub(super) fn format(self, format: &str) -> Result<String> {
        let (year, month, day) = self.civil();
        let weekday = (self.days + 4).rem_euclid(7);
        let of_year = self.days - days_of(year, 1, 1);
        let (hour, minute, second) = (self.seconds / 3600, self.seconds / 60 % 60, self.seconds % 60);
        let hour12 = (hour + 11) % 12 + 1;
        let name = |names: &[&str], index: i64, short: bool| {
            let name = names[index as usize];
            if short { name[..3].to_string() } else { name.to_string() }
        };
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut letter = chars.next();
            // glibc's `%-d`: without padding.
            let bare = letter == Some('-');
            if bare {
                letter = chars.next();
            }
            let pad = |number: i64, width: usize| {
                if bare { number.to_string() } else { format!("{number:0width$}") }
            };
            out.push_str(&match letter {
                Some('Y') => year.to_string(),
                Some('y') => pad(year % 100, 2),
                Some('m') => pad(month, 2),
                Some('d') => pad(day, 2),
                Some('e') => {
                    if bare {
                        day.to_string()
                    } else {
                        format!("{day:2}")
                    }
                }
                Some('H') => pad(hour, 2),
                Some('I') => pad(hour12, 2),
                Some('M') => pad(minute, 2),
                Some('S') => pad(second, 2),
                Some('j') => pad(of_year + 1, 3),
                Some('f') => "000000".into(),
                Some('p') => if hour < 12 { "AM" } else { "PM" }.into(),
                Some('B') => name(&MONTHS, month - 1, false),
                Some('b' | 'h') => name(&MONTHS, month - 1, true),
                Some('A') => name(&WEEKDAYS, weekday, false),
                Some('a') => name(&WEEKDAYS, weekday, true),
                Some('w') => weekday.to_string(),
                Some('u') => ((weekday + 6) % 7 + 1).to_string(),
                Some('F') => format!("{year}-{month:02}-{day:02}"),
                Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
                Some('R') => format!("{hour:02}:{minute:02}"),
                Some('D') => format!("{month:02}/{day:02}/{:02}", year % 100),
                Some('c') => format!(
                    "{} {} {day:2} {hour:02}:{minute:02}:{second:02} {year}",
                    name(&WEEKDAYS, weekday, true),
                    name(&MONTHS, month - 1, true)
                ),
                Some('x') => format!("{month:02}/{day:02}/{:02}", year % 100),
                Some('X') => format!("{hour:02}:{minute:02}:{second:02}"),
                // A date without a zone has none to write.
                Some('z' | 'Z') => String::new(),
                Some('n') => "\n".into(),
                Some('t') => "\t".into(),
                Some('%') => "%".into(),
                other => {
                    let letter = other.map_or(String::new(), String::from);
                    return Err(problem(format!("strftime_now: %{letter} is not supported")));
                }
            });
        }
        Ok(out)
    }
}

impl std::fmt::Display for Date {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (year, month, day) = self.civil();
        let (hour, minute, second) = (self.seconds / 3600, self.seconds / 60 % 60, self.seconds % 60);
        write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}")
    }
}

/// Days since 1970-01-01.
fn days_of(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_written_as_python_writes_them() {
        let date = Date::parse("2024-02-29T15:04:05").expect("a date");
        let text = date.format("%Y-%m-%d %B %b %A %a %e %-d %H:%M:%S %I %p %j %y %%").expect("a format");
        assert_eq!(text, "2024-02-29 February Feb Thursday Thu 29 29 15:04:05 03 PM 060 24 %");
        assert_eq!(date.to_string(), "2024-02-29T15:04:05");
        assert_eq!(Date::parse("1970-01-01").map(|date| date.days), Some(0));
        assert_eq!(
            Date::parse("2100-12-31").and_then(|date| date.format("%j %A").ok()).as_deref(),
            Some("365 Friday")
        );
        assert!(date.format("%Q").is_err());
        for wrong in ["2023-02-29", "2024-13-01", "24-01-01", "2024-01-01T24:00:00", "today", "2024-01", ""] {
            assert_eq!(Date::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn floats_are_written_as_python_writes_them() {
        let text = [0.1, 1.0, -0.0, 1e16, 1.5e-7, 123456789.125, 1e15, 1e-4, f64::INFINITY].map(float);
        assert_eq!(
            text,
            [
                "0.1",
                "1.0",
                "-0.0",
                "1e+16",
                "1.5e-07",
                "123456789.125",
                "1000000000000000.0",
                "0.0001",
                "Infinity"
            ]
        );
    }
}
