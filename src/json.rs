//! Writes JSON: answers to Python's queries, and the dump of a failed group. An answer crosses the bridge as one string,
//! so a new field changes the core and the package's types, but not the bridge.

use std::fmt::{Display, Write as _};

/// A JSON object that is being written to a text.
pub struct Object<'a> {
    out: &'a mut String,
    first: bool,
}

/// Appends an object; `fill` writes its fields.
pub fn object(out: &mut String, fill: impl FnOnce(&mut Object<'_>)) {
    out.push('{');
    fill(&mut Object { out, first: true });
    out.push('}');
}

/// Returns the JSON text of one object; `fill` writes its fields.
pub fn text(fill: impl FnOnce(&mut Object<'_>)) -> String {
    let mut out = String::new();
    object(&mut out, fill);
    out
}

/// Appends a list; `each` writes one item.
pub fn list<T>(out: &mut String, items: impl IntoIterator<Item = T>, mut each: impl FnMut(&mut String, T)) {
    out.push('[');
    for (at, item) in items.into_iter().enumerate() {
        if at > 0 {
            out.push(',');
        }
        each(out, item);
    }
    out.push(']');
}

/// Appends a list of whole numbers.
pub fn numbers<T: Display>(out: &mut String, items: impl IntoIterator<Item = T>) {
    list(out, items, |out, item| {
        let _ = write!(out, "{item}");
    });
}

/// Appends a string.
pub fn string(out: &mut String, text: &str) {
    out.push('"');
    let mut rest = text;
    while let Some(at) = rest.find(|c: char| c == '"' || c == '\\' || c < ' ') {
        out.push_str(&rest[..at]);
        let _ = match rest.as_bytes()[at] {
            c @ (b'"' | b'\\') => write!(out, "\\{}", c as char),
            c => write!(out, "\\u{c:04x}"),
        };
        rest = &rest[at + 1..];
    }
    out.push_str(rest);
    out.push('"');
}

impl Object<'_> {
    /// Names of fields are our own constants and need no escaping.
    fn name(&mut self, name: &str) -> &mut String {
        self.out.push_str(if self.first { "\"" } else { ",\"" });
        self.first = false;
        self.out.push_str(name);
        self.out.push_str("\":");
        self.out
    }
    /// Writes a whole number.
    pub fn number(&mut self, name: &str, value: impl Display) -> &mut Self {
        let _ = write!(self.name(name), "{value}");
        self
    }
    pub fn flag(&mut self, name: &str, value: bool) -> &mut Self {
        self.number(name, value)
    }
    pub fn string(&mut self, name: &str, value: &str) -> &mut Self {
        string(self.name(name), value);
        self
    }
    pub fn null(&mut self, name: &str) -> &mut Self {
        self.name(name).push_str("null");
        self
    }
    pub fn object(&mut self, name: &str, fill: impl FnOnce(&mut Object<'_>)) -> &mut Self {
        object(self.name(name), fill);
        self
    }
    pub fn numbers<T: Display>(&mut self, name: &str, items: impl IntoIterator<Item = T>) -> &mut Self {
        numbers(self.name(name), items);
        self
    }
    pub fn list<T>(
        &mut self,
        name: &str,
        items: impl IntoIterator<Item = T>,
        each: impl FnMut(&mut String, T),
    ) -> &mut Self {
        list(self.name(name), items, each);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_json() {
        let found = text(|to| {
            to.number("a", 1).string("b", "a \"b\" \\ c\nd \u{e9}").flag("c", true).null("d");
            to.list("e", [1, 2], |out, n| numbers(out, [n, -n])).object("f", |to| {
                to.list("g", ["x"], string);
            });
        });
        assert_eq!(
            found,
            "{\"a\":1,\"b\":\"a \\\"b\\\" \\\\ c\\u000ad \u{e9}\",\"c\":true,\"d\":null,\"e\":[[1,-1],[2,-2]],\"f\":{\"g\":[\"x\"]}}"
        );
    }
}
