//! From Metal's dialect to C++, for what types and macros cannot do.
//!
//! Tokens are rewritten one by one and lines are kept, so that the compiler's and the runner's line numbers are
//! those of the source MLX writes. Rewritten are: attributes and address spaces (dropped, `constant` becomes
//! `const`), threadgroup *variables* as against threadgroup *pointers*, and literals, which are `float` in Metal
//! when unsuffixed.

use std::fmt::Write as _;

use crate::kernel::Kernel;
use crate::wrapper::{self, Argument};

const FUNCTION: &str = "msl_emu_kernel";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Space,
    Comment,
    Text,
    Word,
    Number,
    Mark,
}

#[derive(Debug, Clone)]
struct Token {
    kind: Kind,
    text: String,
}

impl Token {
    fn is(&self, text: &str) -> bool {
        self.text == text
    }

    fn counts(&self) -> bool {
        !matches!(self.kind, Kind::Space | Kind::Comment)
    }
}

fn tokens(text: &str) -> Vec<Token> {
    let bytes = text.as_bytes();
    let at = |i: usize| bytes.get(i).copied().unwrap_or(0);
    let word = |c: u8| c == b'_' || c.is_ascii_alphanumeric() || c >= 0x80;
    let mut all = Vec::new();
    let mut i = 0;
    while i < bytes.len() {
        let start = i;
        let c = at(i);
        let kind = if c.is_ascii_whitespace() {
            while i < bytes.len() && at(i).is_ascii_whitespace() {
                i += 1;
            }
            Kind::Space
        } else if c == b'/' && at(i + 1) == b'/' {
            while i < bytes.len() && at(i) != b'\n' {
                i += 1;
            }
            Kind::Comment
        } else if c == b'/' && at(i + 1) == b'*' {
            i += 2;
            while i < bytes.len() && !(at(i) == b'*' && at(i + 1) == b'/') {
                i += 1;
            }
            i = (i + 2).min(bytes.len());
            Kind::Comment
        } else if c == b'"' || c == b'\'' {
            i += 1;
            while i < bytes.len() && at(i) != c && at(i) != b'\n' {
                i += if at(i) == b'\\' { 2 } else { 1 };
            }
            i = (i + 1).min(bytes.len());
            Kind::Text
        } else if c.is_ascii_digit() || (c == b'.' && at(i + 1).is_ascii_digit()) {
            let hex = c == b'0' && matches!(at(i + 1), b'x' | b'X');
            while i < bytes.len() {
                let exponent = if hex { matches!(at(i), b'p' | b'P') } else { matches!(at(i), b'e' | b'E') };
                if exponent && matches!(at(i + 1), b'+' | b'-') {
                    i += 2;
                } else if word(at(i)) || at(i) == b'.' || (at(i) == b'\'' && word(at(i + 1))) {
                    i += 1;
                } else {
                    break;
                }
            }
            Kind::Number
        } else if word(c) {
            while i < bytes.len() && word(at(i)) {
                i += 1;
            }
            Kind::Word
        } else {
            i += if (c == b'[' && at(i + 1) == b'[')
                || (c == b':' && at(i + 1) == b':')
                || (c == b'-' && at(i + 1) == b'>')
            {
                2
            } else {
                1
            };
            Kind::Mark
        };
        while !text.is_char_boundary(i) {
            i += 1;
        }
        all.push(Token { kind, text: text[start..i].to_owned() });
    }
    all
}

/// A literal as C++ has it: what has a point or an exponent is a `float` unless its suffix says otherwise.
fn literal(text: &str) -> String {
    let lower = text.to_ascii_lowercase();
    let hex = lower.starts_with("0x");
    let floating = if hex {
        lower.contains('p')
    } else {
        !lower.starts_with("0b") && lower.contains(['.', 'e', 'h', 'f'])
    };
    if !floating {
        return text.to_owned();
    }
    let float = |digits: &str| {
        let whole = !hex && !digits.contains(['.', 'e', 'E']);
        format!("{digits}{}f", if whole { ".0" } else { "" })
    };
    if !hex && lower.ends_with("bf") {
        format!("bfloat({})", float(&text[..text.len() - 2]))
    } else if !hex && lower.ends_with('h') {
        format!("half({})", float(&text[..text.len() - 1]))
    } else if lower.ends_with('f') {
        float(&text[..text.len() - 1])
    } else {
        float(text)
    }
}

/// The line ends of a piece of text that is left out.
fn line_ends(text: &str) -> String {
    text.chars().filter(|&c| c == '\n').collect()
}

/// A threadgroup variable's declaration from the token after `threadgroup`: the token after its semicolon, and
/// for each declarator the token that names it. `None` where the word qualifies a pointer or a reference.
fn declaration(tokens: &[Token], start: usize) -> Option<(usize, Vec<usize>)> {
    let mut names = Vec::new();
    let mut last_word = None;
    let mut named = false;
    let (mut angle, mut square) = (0i32, 0i32);
    for (i, token) in tokens.iter().enumerate().skip(start) {
        if !token.counts() {
            continue;
        }
        if square > 0 {
            square += i32::from(token.is("[")) + 2 * i32::from(token.is("[[")) - i32::from(token.is("]"));
            continue;
        }
        match token.text.as_str() {
            "<" if !named => angle += 1,
            ">" if !named => angle -= 1,
            _ if angle > 0 => {}
            "[" | "," | ";" => {
                if !named {
                    names.push(last_word?);
                    named = true;
                }
                match token.text.as_str() {
                    "[" => square = 1,
                    "," => {
                        named = false;
                        last_word = None;
                    }
                    _ => return Some((i + 1, names)),
                }
            }
            "::" => {}
            _ if token.kind == Kind::Word && !named => last_word = Some(i),
            // A pointer, a reference, a parameter's end, or something this does not know.
            _ => return None,
        }
    }
    None
}

/// Types whose `const volatile` values can be read like any other.
const SCALARS: [&str; 20] = [
    "bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "float", "size_t", "int8_t",
    "uint8_t", "int16_t", "uint16_t", "int32_t", "uint32_t", "int64_t", "uint64_t", "unsigned",
];

#[derive(Default)]
struct Translator {
    out: String,
    variables: usize,
    /// Make what `constant` pointers point to volatile, as a stand-in for an address space.
    spaces: bool,
    /// Pointers to `constant` scalars seen.
    marked: usize,
    /// Pointers to other `constant` types seen.
    unmarked: usize,
}

impl Translator {
    fn feed(&mut self, text: &str) {
        let mut tokens = tokens(text);
        let mut i = 0;
        let mut line_start = true;
        // Semicolon tokens after which references to threadgroup variables are declared.
        let mut after: Vec<(usize, String)> = Vec::new();
        while i < tokens.len() {
            let token = tokens[i].clone();
            let begins_line = line_start;
            match token.kind {
                Kind::Space | Kind::Comment => line_start = line_start || token.text.contains('\n'),
                _ => line_start = false,
            }
            match token.kind {
                Kind::Mark if token.is("#") && begins_line => {
                    // A directive: up to a line end that no backslash precedes.
                    let mut directive = String::new();
                    let mut j = i + 1;
                    while j < tokens.len() {
                        let t = &tokens[j];
                        if t.kind == Kind::Space
                            && t.text.contains('\n')
                            && !directive.trim_end_matches([' ', '\t']).ends_with('\\')
                        {
                            break;
                        }
                        directive += &t.text;
                        j += 1;
                    }
                    let words: Vec<&str> = directive.split_whitespace().collect();
                    let dropped = matches!(words.first(), Some(&"include" | &"pragma"));
                    if dropped {
                        self.out += &line_ends(&directive);
                        i = j;
                        continue;
                    }
                    self.out += "#";
                }
                Kind::Mark if token.is("[[") => {
                    let mut j = i + 1;
                    let mut skipped = String::new();
                    while j + 1 < tokens.len() && !(tokens[j].is("]") && tokens[j + 1].is("]")) {
                        skipped += &tokens[j].text;
                        j += 1;
                    }
                    self.out += &line_ends(&skipped);
                    i = j + 2;
                    continue;
                }
                Kind::Number => self.out += &literal(&token.text),
                Kind::Word => match token.text.as_str() {
                    "device" | "thread" | "kernel" => self.out += " ",
                    "constant" => {
                        let beside = |token: Option<&Token>| token.is_some_and(|t| t.is("const"));
                        let before = tokens[..i].iter().rev().find(|t| t.counts());
                        let next = tokens[i + 1..].iter().find(|t| t.counts());
                        let mut ahead = tokens[i + 1..].iter().filter(|t| t.counts() && !t.is("const"));
                        let scalar = ahead.next().is_some_and(|t| SCALARS.contains(&t.text.as_str()));
                        let points = ahead.next().is_some_and(|t| t.is("*"));
                        self.marked += usize::from(scalar && points);
                        self.unmarked += usize::from(!scalar && points);
                        self.out += if beside(before) || beside(next) { " " } else { "const" };
                        if self.spaces && scalar && points {
                            self.out += " volatile";
                        }
                    }
                    "threadgroup" => match declaration(&tokens, i + 1) {
                        Some((end, names)) => {
                            self.out += "typedef";
                            let mut references = String::new();
                            for name in names {
                                let variable = tokens[name].text.clone();
                                let kind = format!("msl_emu_type_{variable}");
                                let _ = write!(
                                    references,
                                    " auto& {variable} = metal::emu::threadgroup_variable<{kind}>({}, \"{variable}\");",
                                    self.variables
                                );
                                self.variables += 1;
                                tokens[name].text = kind;
                            }
                            after.push((end, references));
                        }
                        None => self.out += " ",
                    },
                    _ => self.out += &token.text,
                },
                _ => self.out += &token.text,
            }
            i += 1;
            while let Some(k) = after.iter().position(|(end, _)| *end == i) {
                let (_, references) = after.swap_remove(k);
                self.out += &references;
            }
        }
    }
}

/// The C++ text of a kernel: shim, translated source, entry point.
pub(crate) fn translate(kernel: &Kernel, shim: &str) -> String {
    write(kernel, shim, Translator::default()).out
}

/// The same, for a compiler to look at only, with `constant` pointers as a type of their own: an input of fewer
/// than eight elements is `constant`, and a helper that takes `const device T*` does not take it. `None` where
/// there is nothing to see, or where a pointer to something other than a scalar would not survive the stand-in.
pub(crate) fn with_spaces(kernel: &Kernel, shim: &str) -> Option<String> {
    let t = write(kernel, shim, Translator { spaces: true, ..Translator::default() });
    (t.marked > 0 && t.unmarked == 0).then_some(t.out)
}

/// Whether the source says that `a * b + c` rounds twice.
pub(crate) fn forbids_contraction(kernel: &Kernel) -> bool {
    [&kernel.header, &kernel.source].into_iter().flat_map(|text| text.lines()).any(|line| {
        let words: String = line.split_whitespace().collect();
        words.starts_with("#pragmaMETALfpcontract(off)")
    })
}

fn write(kernel: &Kernel, shim: &str, mut t: Translator) -> Translator {
    t.out += "#line 1 \"msl_emu_shim.h\"\n";
    t.out += shim;
    t.out += "#line 1 \"kernel.metal\"\n";
    t.feed(&kernel.header);
    let signature = wrapper::signature(kernel, FUNCTION);
    t.feed(&signature.replacen("void", "static inline void", 1));
    t.feed(&kernel.source);
    t.out += "\nmsl_emu_body_end(); }\n#line 1 \"entry\"\n";
    t.out += "extern \"C\" __attribute__((visibility(\"default\")))\n\
              void msl_emu_entry(void* const* b, const msl_emu_position* p, const msl_emu_group* g) {\n\
              (void)b, (void)p, (void)g;\n";
    let _ = write!(t.out, "{}(", wrapper::instance(kernel, FUNCTION));
    let mut values: Vec<String> = Vec::new();
    for (index, argument) in wrapper::arguments(kernel).into_iter().enumerate() {
        values.push(match argument {
            Argument::Input(i) => {
                let input = &kernel.inputs[i];
                let star = if input.shape.is_empty() { "*" } else { "" };
                format!("{star}(const {}*)b[{index}]", input.dtype.metal())
            }
            Argument::Shape(_) => format!("(const int*)b[{index}]"),
            Argument::Strides(_) => format!("(const int64_t*)b[{index}]"),
            Argument::Ndim(_) => format!("*(const int*)b[{index}]"),
            Argument::Output(i) => {
                let kind = kernel.outputs[i].dtype.metal();
                if kernel.atomic_outputs {
                    format!("(atomic<{kind}>*)b[{index}]")
                } else {
                    format!("({kind}*)b[{index}]")
                }
            }
        });
    }
    let three = |field: &str| format!("uint3(g->{field}[0], g->{field}[1], g->{field}[2])");
    let threads = |field: &str| format!("(g->{field}[0] * g->{field}[1] * g->{field}[2])");
    for (name, _) in wrapper::attributes(kernel) {
        values.push(match name {
            "dispatch_quadgroups_per_threadgroup" => format!("({} + 3) / 4", threads("nominal")),
            "dispatch_simdgroups_per_threadgroup" => format!("({} + 31) / 32", threads("nominal")),
            "dispatch_threads_per_threadgroup" => three("nominal"),
            "grid_origin" => "uint3(0, 0, 0)".to_owned(),
            "grid_size" | "threads_per_grid" => three("grid"),
            "quadgroup_index_in_threadgroup" => "p->index / 4".to_owned(),
            "quadgroups_per_threadgroup" => format!("({} + 3) / 4", threads("size")),
            "simdgroup_index_in_threadgroup" => "p->index / 32".to_owned(),
            "simdgroups_per_threadgroup" => format!("({} + 31) / 32", threads("size")),
            "thread_execution_width" | "threads_per_simdgroup" => "32u".to_owned(),
            "thread_index_in_quadgroup" => "p->index % 4".to_owned(),
            "thread_index_in_simdgroup" => "p->index % 32".to_owned(),
            "thread_index_in_threadgroup" => "p->index".to_owned(),
            "thread_position_in_grid" => "uint3(g->position[0] * g->nominal[0] + p->x, \
                 g->position[1] * g->nominal[1] + p->y, g->position[2] * g->nominal[2] + p->z)"
                .to_owned(),
            "thread_position_in_threadgroup" => "uint3(p->x, p->y, p->z)".to_owned(),
            "threadgroup_position_in_grid" => three("position"),
            "threadgroups_per_grid" => three("groups"),
            _ => three("size"),
        });
    }
    t.out += &values.join(", ");
    t.out += ");\n}\n";
    t
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(text: &str) -> String {
        let mut t = Translator::default();
        t.feed(text);
        t.out
    }

    #[test]
    fn literals_are_float() {
        for (metal, cpp) in [
            ("1.0", "1.0f"),
            (".5", ".5f"),
            ("1e-3", "1e-3f"),
            ("1.f", "1.f"),
            ("2.5F", "2.5f"),
            ("1.0h", "half(1.0f)"),
            ("3h", "half(3.0f)"),
            ("1.0bf", "bfloat(1.0f)"),
            ("0x1p3", "0x1p3f"),
            ("0x1F", "0x1F"),
            ("0xFFFFFFFFu", "0xFFFFFFFFu"),
            ("0x1e5", "0x1e5"),
            ("12u", "12u"),
            ("12ul", "12ul"),
            ("0b101", "0b101"),
        ] {
            assert_eq!(feed(metal), cpp);
        }
        assert_eq!(feed("a.x+1.0-b1.y"), "a.x+1.0f-b1.y");
    }

    #[test]
    fn threadgroup_variables_and_pointers_differ() {
        assert_eq!(
            feed("threadgroup float a[2][N], b;"),
            "typedef float msl_emu_type_a[2][N], msl_emu_type_b; \
             auto& a = metal::emu::threadgroup_variable<msl_emu_type_a>(0, \"a\"); \
             auto& b = metal::emu::threadgroup_variable<msl_emu_type_b>(1, \"b\");"
        );
        assert_eq!(
            feed("threadgroup array<vec<T, 2>, 4> a;"),
            "typedef array<vec<T, 2>, 4> msl_emu_type_a; \
             auto& a = metal::emu::threadgroup_variable<msl_emu_type_a>(0, \"a\");"
        );
        assert_eq!(feed("threadgroup float* p = a;").trim(), "float* p = a;");
        assert_eq!(feed("void f(threadgroup T* p, int n);"), "void f(  T* p, int n);");
        assert_eq!(feed("(threadgroup uint*)p;"), "(  uint*)p;");
        assert_eq!(feed("threadgroup float (&t)[4]"), "  float (&t)[4]");
        assert_eq!(
            feed("threadgroup_barrier(mem_flags::mem_threadgroup);"),
            "threadgroup_barrier(mem_flags::mem_threadgroup);"
        );
    }

    #[test]
    fn spaces_attributes_and_directives_go_and_lines_stay() {
        assert_eq!(feed("const constant float* a [[buffer(0)]]"), "const   float* a ");
        assert_eq!(feed("constant float t[2] = {1.0, 2};"), "const float t[2] = {1.0f, 2};");
        assert_eq!(feed("#include <metal_stdlib>\n#pragma METAL fp contract(off)\nint x;"), "\n\nint x;");
        assert_eq!(feed("#define A(x) \\\n  (x + 1.0)\nA(2)"), "#define A(x) \\\n  (x + 1.0f)\nA(2)");
        assert_eq!(feed("// a 1.0 device\n\"1.0\" /* \n */ 1.0"), "// a 1.0 device\n\"1.0\" /* \n */ 1.0f");
        assert_eq!(feed("[[unroll]] for (;;) {}"), " for (;;) {}");
        assert_eq!(feed("a[b[0]] = 1;"), "a[b[0]] = 1;");
    }
}
