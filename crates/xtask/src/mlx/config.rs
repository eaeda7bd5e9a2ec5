//! The text of `.cargo/mlx-linux.toml`, which Cargo reads in place of running mlx-sys's build script.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::{Backend, Choice, Installed};

const CHOICE: &str = "# choice: ";

/// The file that makes Cargo use what is installed.
pub(crate) fn text(installed: &Installed) -> Result<String> {
    let triple = installed.triple;
    let lib = path(&installed.lib())?;
    let mlx_lib = path(&installed.mlx.lib)?;
    let bindings = quoted(path(&installed.bindings())?);
    let include = quoted(format!("{}:{}", path(&installed.mlx.include)?, path(&installed.mlx_c)?));
    let search = [lib.as_str(), &mlx_lib].map(|folder| quoted(format!("native={folder}"))).join(", ");

    let mut link_args = vec![format!("-Wl,-rpath,{lib}"), format!("-Wl,-rpath,{mlx_lib}")];
    if matches!(installed.choice, Choice::Wheel(Backend::Cuda12 | Backend::Cuda13)) {
        // libcuda.so.1 belongs to the driver, which a machine that only compiles may lack.
        link_args.push("-Wl,--allow-shlib-undefined".to_owned());
    }
    let flags: Vec<_> =
        link_args.iter().map(|arg| format!("\"-C\", {}", quoted(format!("link-arg={arg}")))).collect();

    Ok(format!(
        r#"# Written by `cargo xtask mlx`, which replaces it when something changed. Not for version control.
{CHOICE}{choice}

[target.{triple}.mlx]
rustc-link-search = [{search}]
rustc-link-lib = ["dylib=mlxc", "dylib=mlx", "dylib=stdc++"]
rustc-env = {{ OUT_DIR = {bindings} }}
include = {include}
defines = ""
version = {version}

[target.{triple}]
rustflags = [{flags}]
rustdocflags = [{flags}]
"#,
        choice = installed.choice,
        version = quoted(&installed.mlx_version),
        flags = flags.join(", "),
    ))
}

/// The choice that such a file records.
pub(crate) fn recorded_choice(text: &str) -> Option<Choice> {
    Choice::parse(text.lines().find_map(|line| line.strip_prefix(CHOICE))?)
}

/// A path that can stand in a list with ':' between and in a linker argument with ',' between.
fn path(path: &Path) -> Result<String> {
    let text = path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?;
    ensure!(
        !text.contains([':', ',', '\n', '\r']),
        "{text:?} has a ':', a ',' or a line break, which a list of folders cannot hold: use another folder"
    );
    Ok(text.to_owned())
}

/// A TOML basic string.
fn quoted(text: impl AsRef<str>) -> String {
    let mut out = String::from("\"");
    for c in text.as_ref().chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => out.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::super::MlxFolders;
    use super::*;

    fn installed(choice: Choice) -> Installed {
        Installed {
            triple: "x86_64-unknown-linux-gnu",
            choice,
            mlx_version: "0.32.2".into(),
            folder: "/w/target/mlx/k".into(),
            mlx_c: "/r/mlx-c".into(),
            mlx: MlxFolders { lib: "/m/lib".into(), include: "/m/include".into() },
        }
    }

    #[test]
    fn cpu_text() {
        let expected = r#"# Written by `cargo xtask mlx`, which replaces it when something changed. Not for version control.
# choice: cpu

[target.x86_64-unknown-linux-gnu.mlx]
rustc-link-search = ["native=/w/target/mlx/k/lib", "native=/m/lib"]
rustc-link-lib = ["dylib=mlxc", "dylib=mlx", "dylib=stdc++"]
rustc-env = { OUT_DIR = "/w/target/mlx/k/bindings" }
include = "/m/include:/r/mlx-c"
defines = ""
version = "0.32.2"

[target.x86_64-unknown-linux-gnu]
rustflags = ["-C", "link-arg=-Wl,-rpath,/w/target/mlx/k/lib", "-C", "link-arg=-Wl,-rpath,/m/lib"]
rustdocflags = ["-C", "link-arg=-Wl,-rpath,/w/target/mlx/k/lib", "-C", "link-arg=-Wl,-rpath,/m/lib"]
"#;
        assert_eq!(text(&installed(Choice::Wheel(Backend::Cpu))).unwrap(), expected);
    }

    #[test]
    fn choice_is_recorded() {
        for choice in [Choice::Wheel(Backend::Cuda13), Choice::From("/m".into())] {
            let text = text(&installed(choice.clone())).unwrap();
            assert_eq!(recorded_choice(&text), Some(choice));
        }
        assert_eq!(recorded_choice("[target]\n"), None);
        assert_eq!(recorded_choice("# choice: vax\n"), None);
    }

    #[test]
    fn only_cuda_links_without_its_driver() {
        let lenient = |choice| text(&installed(choice)).unwrap().contains("allow-shlib-undefined");
        assert!(lenient(Choice::Wheel(Backend::Cuda12)));
        assert!(!lenient(Choice::Wheel(Backend::Cpu)));
    }

    #[test]
    fn strings_are_escaped() {
        assert_eq!(quoted("/a b/ü"), r#""/a b/ü""#);
        assert_eq!(quoted(r#"a"b\c"#), r#""a\"b\\c""#);
        assert_eq!(quoted("\t\u{7f}"), r#""\u0009\u007F""#);
    }

    #[test]
    fn unusable_paths_are_refused() {
        for bad in ["/a:b", "/a,b", "/a\nb"] {
            assert!(path(Path::new(bad)).unwrap_err().to_string().contains("another folder"));
        }
        assert!(path(Path::new("/with space")).is_ok());
    }
}
