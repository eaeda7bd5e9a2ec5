//! Compiles the mlx-c that mlx-sys brings into `libmlxc.so`. Its CMake files would fetch and build MLX too;
//! what is left without that is one compiler call for each file.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::files;
use crate::process::{self, say};

/// Force-included in every file of mlx-c.
pub(crate) const SHIM_HEADER: &str = include_str!("../../shim/linux.h");

/// Compiled into the library.
pub(crate) const SHIM_SOURCE: &str = include_str!("../../shim/mach_time.cpp");

/// The compiler's flags. mlx-c only hands calls on, so that -O2 would buy nothing but waiting.
pub(crate) const FLAGS: &str = "-std=c++20 -O1 -fPIC -DNDEBUG -w";

/// A C++ compiler that can be started.
#[derive(Debug)]
pub(crate) struct Compiler {
    /// The program and its first arguments, as in `CXX="ccache g++"`.
    words: Vec<String>,
}

impl Compiler {
    /// Finds `$CXX`, or else `g++`.
    pub(crate) fn find() -> Result<Self> {
        let named = env::var("CXX").unwrap_or_default();
        let words: Vec<_> = named.split_whitespace().map(str::to_owned).collect();
        let compiler = Self { words: if words.is_empty() { vec!["g++".to_owned()] } else { words } };
        process::output(compiler.command().arg("--version")).with_context(|| {
            format!(
                "`{}` is needed to compile mlx-c: install a C++20 compiler (Debian and Ubuntu: g++), or set CXX",
                compiler.words.join(" ")
            )
        })?;
        Ok(compiler)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]);
        command
    }

    /// The folder of the headers that belong to the compiler, such as stddef.h.
    pub(crate) fn include(&self) -> Result<PathBuf> {
        let ask = |question| {
            let answer = process::output(self.command().arg(question))?;
            anyhow::Ok(PathBuf::from(answer.trim()))
        };
        let gcc = ask("-print-file-name=include")?;
        // clang answers that with the bare name.
        let folder = if gcc.is_absolute() { gcc } else { ask("-print-resource-dir")?.join("include") };
        ensure!(
            folder.join("stddef.h").is_file(),
            "expected stddef.h among the headers of `{}`, in {}; it is not there",
            self.words.join(" "),
            folder.display()
        );
        Ok(folder)
    }
}

/// Our own C and C++, on disk.
#[derive(Debug)]
pub(crate) struct Shim {
    /// To be included before anything else.
    pub(crate) header: PathBuf,
    /// To be compiled along.
    source: PathBuf,
}

impl Shim {
    /// Writes the files into a folder that exists or not.
    pub(crate) fn write(folder: &Path) -> Result<Self> {
        let shim = Self { header: folder.join("linux.h"), source: folder.join("mach_time.cpp") };
        fs::create_dir_all(folder)
            .and_then(|()| fs::write(&shim.header, SHIM_HEADER))
            .and_then(|()| fs::write(&shim.source, SHIM_SOURCE))
            .with_context(|| format!("cannot write into {}", folder.display()))?;
        Ok(shim)
    }
}

/// What to compile, and where to.
#[derive(Debug)]
pub(crate) struct Build<'a> {
    /// The compiler.
    pub(crate) compiler: &'a Compiler,
    /// mlx-c's source folder.
    pub(crate) mlx_c: &'a Path,
    /// The folder of MLX's headers.
    pub(crate) mlx_include: &'a Path,
    /// The folder of libmlx.so.
    pub(crate) mlx_lib: &'a Path,
    /// Where the library looks for libmlx.so when it is loaded.
    pub(crate) run_path: &'a str,
    pub(crate) shim: &'a Shim,
    /// A folder for the object files.
    pub(crate) objects: &'a Path,
    /// The file to make.
    pub(crate) library: &'a Path,
}

/// Compiles on all processors, and links.
pub(crate) fn build(build: &Build<'_>) -> Result<()> {
    let mut sources = files::with_extension(&build.mlx_c.join("mlx/c"), "cpp")?;
    sources.push(build.shim.source.clone());
    let library_folder = build.library.parent().unwrap_or(Path::new("."));
    for folder in [build.objects, library_folder] {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }

    let workers = thread::available_parallelism().map_or(1, usize::from).min(sources.len());
    let started = Instant::now();
    say(format_args!("compiling mlx-c, {} files on {workers} processors", sources.len()));
    let queue = Mutex::new(sources.iter());
    let next = || queue.lock().ok()?.next();
    thread::scope(|scope| {
        let worker = || -> Result<()> {
            while let Some(source) = next() {
                // One failure ends the whole build: leave the others nothing to do.
                build.compile(source).inspect_err(|_| while next().is_some() {})?;
            }
            Ok(())
        };
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
        let results = workers.into_iter().map(|worker| worker.join().expect("workers return their errors"));
        results.collect::<Result<()>>()
    })?;
    build.link(&sources)?;
    say(format_args!("compiled mlx-c in {:.0} s", started.elapsed().as_secs_f64()));
    Ok(())
}

impl Build<'_> {
    fn object(&self, source: &Path) -> PathBuf {
        self.objects.join(source.file_name().unwrap_or_default()).with_extension("o")
    }

    fn compile(&self, source: &Path) -> Result<()> {
        let mut command = self.compiler.command();
        command.args(FLAGS.split(' ')).arg("-isystem").arg(self.mlx_include).arg("-I").arg(self.mlx_c);
        command.arg("-include").arg(&self.shim.header);
        command.arg("-c").arg(source).arg("-o").arg(self.object(source));
        process::output(&mut command)
            .map(drop)
            .with_context(|| format!("cannot compile {}", source.display()))
    }

    fn link(&self, sources: &[PathBuf]) -> Result<()> {
        let mut command = self.compiler.command();
        command.arg("-shared").args(sources.iter().map(|source| self.object(source)));
        command.arg("-L").arg(self.mlx_lib).arg("-lmlx");
        // A symbol that MLX lacks should show up here and not in the user's program.
        command.args(["-Wl,--no-undefined", "-Wl,-soname,libmlxc.so"]);
        command.arg(format!("-Wl,-rpath,{}", self.run_path)).arg("-o").arg(self.library);
        process::output(&mut command).map(drop).context("cannot link libmlxc.so")
    }
}
