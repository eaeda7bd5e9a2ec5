//! The Metal source around a kernel's body, letter for letter as MLX 0.32.2 writes it.

use std::fmt::Write as _;

use crate::error::{Location, Part};
use crate::kernel::{Array, Kernel};

/// Inputs with fewer elements live in the `constant` address space.
const MAX_CONSTANT_ELEMENTS: usize = 8;

/// The attributes MLX passes when their name occurs anywhere in the body, in MLX's order.
pub(crate) const ATTRIBUTES: [(&str, bool); 20] = [
    ("dispatch_quadgroups_per_threadgroup", false),
    ("dispatch_simdgroups_per_threadgroup", false),
    ("dispatch_threads_per_threadgroup", true),
    ("grid_origin", true),
    ("grid_size", true),
    ("quadgroup_index_in_threadgroup", false),
    ("quadgroups_per_threadgroup", false),
    ("simdgroup_index_in_threadgroup", false),
    ("simdgroups_per_threadgroup", false),
    ("thread_execution_width", false),
    ("thread_index_in_quadgroup", false),
    ("thread_index_in_simdgroup", false),
    ("thread_index_in_threadgroup", false),
    ("thread_position_in_grid", true),
    ("thread_position_in_threadgroup", true),
    ("threadgroup_position_in_grid", true),
    ("threadgroups_per_grid", true),
    ("threads_per_grid", true),
    ("threads_per_simdgroup", false),
    ("threads_per_threadgroup", true),
];

/// What one buffer argument of the kernel function holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Argument {
    Input(usize),
    Shape(usize),
    Strides(usize),
    Ndim(usize),
    Output(usize),
}

pub(crate) fn is_constant(input: &Array) -> bool {
    input.len() < MAX_CONSTANT_ELEMENTS
}

/// The buffer arguments, in the order of their indices.
pub(crate) fn arguments(kernel: &Kernel) -> Vec<Argument> {
    let mut all = Vec::new();
    for (i, input) in kernel.inputs.iter().enumerate() {
        all.push(Argument::Input(i));
        if input.shape.is_empty() {
            continue;
        }
        let mentions = |what: &str| kernel.source.contains(&format!("{}_{what}", input.name));
        if mentions("shape") {
            all.push(Argument::Shape(i));
        }
        if mentions("strides") {
            all.push(Argument::Strides(i));
        }
        if mentions("ndim") {
            all.push(Argument::Ndim(i));
        }
    }
    all.extend((0..kernel.outputs.len()).map(Argument::Output));
    all
}

/// The attributes that the body mentions.
pub(crate) fn attributes(kernel: &Kernel) -> impl Iterator<Item = (&'static str, bool)> + '_ {
    ATTRIBUTES.into_iter().filter(|(name, _)| kernel.source.contains(name))
}

fn template_values(kernel: &Kernel) -> String {
    let values: Vec<String> = kernel.template.iter().map(|(_, value)| value.to_string()).collect();
    values.join(", ")
}

/// The name of the function that MLX defines and looks up.
pub(crate) fn host_name(kernel: &Kernel) -> String {
    let mut name = format!("custom_kernel_{}", kernel.name);
    if !kernel.template.is_empty() {
        name += "_";
        for (_, value) in &kernel.template {
            let _ = write!(name, "_{value}");
        }
    }
    for input in &kernel.inputs {
        let _ = write!(name, "_{}", input.dtype.metal());
        if input.shape.is_empty() {
            name += "s";
        } else if is_constant(input) {
            name += "c";
        }
    }
    for output in &kernel.outputs {
        let _ = write!(name, "_{}", output.dtype.metal());
    }
    name
}

/// Template line, function name and parameters, up to and with the opening brace and its line end.
pub(crate) fn signature(kernel: &Kernel, name: &str) -> String {
    let mut text = String::new();
    if !kernel.template.is_empty() {
        let parameters: Vec<String> = kernel
            .template
            .iter()
            .map(|(name, value)| {
                let kind = match value {
                    crate::TemplateArg::Int(_) => "int",
                    crate::TemplateArg::Bool(_) => "bool",
                    crate::TemplateArg::Dtype(_) => "typename",
                };
                format!("{kind} {name}")
            })
            .collect();
        let _ = writeln!(text, "template <{}>", parameters.join(", "));
    }
    let _ = writeln!(text, "[[kernel]] void {name}(");
    let mut parameters: Vec<String> = Vec::new();
    for (index, argument) in arguments(kernel).into_iter().enumerate() {
        let declaration = match argument {
            Argument::Input(i) => {
                let input = &kernel.inputs[i];
                let space = if is_constant(input) { "constant" } else { "device" };
                let reference = if input.shape.is_empty() { "&" } else { "*" };
                format!("const {space} {}{reference} {}", input.dtype.metal(), input.name)
            }
            Argument::Shape(i) => format!("const constant int* {}_shape", kernel.inputs[i].name),
            Argument::Strides(i) => format!("const constant int64_t* {}_strides", kernel.inputs[i].name),
            Argument::Ndim(i) => format!("const constant int& {}_ndim", kernel.inputs[i].name),
            Argument::Output(i) => {
                let output = &kernel.outputs[i];
                let kind = output.dtype.metal();
                if kernel.atomic_outputs {
                    format!("device atomic<{kind}>* {}", output.name)
                } else {
                    format!("device {kind}* {}", output.name)
                }
            }
        };
        parameters.push(format!("  {declaration} [[buffer({index})]]"));
    }
    for (name, vector) in attributes(kernel) {
        let kind = if vector { "uint3" } else { "uint" };
        parameters.push(format!("  {kind} {name} [[{name}]]"));
    }
    text += &parameters.join(",\n");
    text += ") {\n";
    text
}

/// The whole source, as MLX hands it to Metal's compiler (which sees MLX's own header before it).
pub(crate) fn source(kernel: &Kernel) -> String {
    let name = host_name(kernel);
    let mut text = String::new();
    text += &kernel.header;
    text += &signature(kernel, &name);
    text += &kernel.source;
    text += "\n}\n";
    if !kernel.template.is_empty() {
        let instance = format!("{name}<{}>", template_values(kernel));
        let _ = write!(
            text,
            "\ntemplate [[host_name(\"{name}\")]] [[kernel]] decltype({instance}) {instance};\n"
        );
    }
    text
}

/// The name to call: the function with its template arguments.
pub(crate) fn instance(kernel: &Kernel, name: &str) -> String {
    if kernel.template.is_empty() { name.to_owned() } else { format!("{name}<{}>", template_values(kernel)) }
}

/// Where a line of the whole source comes from.
pub(crate) fn locate(kernel: &Kernel, line: u32) -> Option<Location> {
    let newlines = |text: &str| text.matches('\n').count() as u32;
    let header = newlines(&kernel.header);
    let signature = newlines(&signature(kernel, &host_name(kernel)));
    let text = source(kernel);
    let text = text.lines().nth(line.checked_sub(1)? as usize)?.trim().to_owned();
    let body = header + signature;
    let (part, line) = if line <= header
        || (line == header + 1 && !kernel.header.is_empty() && !kernel.header.ends_with('\n'))
    {
        (Part::Header, line)
    } else if line <= body {
        (Part::Signature, line - header)
    } else {
        (Part::Body, line - body)
    };
    Some(Location { part, line, text })
}
