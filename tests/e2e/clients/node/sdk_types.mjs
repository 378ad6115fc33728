// Examples of the request types that an SDK declares, and the names of their kinds, read by the compiler of TypeScript.

import { writeFileSync } from 'node:fs';
import path from 'node:path';
import ts from 'typescript';

export const WORD = 'porcelain';
// One id for all, so that results and approvals find their calls.
export const ID = 'call_1';
const IDS = [
  'id', 'call_id', 'callId', 'tool_use_id', 'tool_call_id', 'toolCallId', 'approval_request_id', 'approvalId',
];
// A small file, because the SDKs download others.
export const DATA = 'cG9yY2VsYWlu';
const FILE = `data:image/png;base64,${DATA}`;
// Values that must have a form.
const FORMS = {
  arguments: '{}', mediaType: 'image/png', format: 'wav', url: FILE, file: FILE, image: FILE, data: DATA,
  ...Object.fromEntries(IDS.map((name) => [name, ID])),
};
// Values of any type, and objects without required fields, that must have a form.
const OBJECTS = {
  input: {},
  parameters: {},
  providerOptions: { openai: { itemId: ID, reasoningEncryptedContent: WORD }, anthropic: { signature: WORD } },
  reference: { openai: ID, anthropic: ID, gateway: ID },
  tools: { type: 'function', name: WORD, parameters: { type: 'object', properties: {} } },
};
const MAX_DEPTH = 5;
const { TypeFlags } = ts;

const isUrl = (type) => type.symbol?.name === 'URL';

/** Return the types of `{name: [module, type]}`, and the checker that knows them. */
export function readTypes(sources) {
  const file = path.resolve('types.ts');
  const lines = Object.values(sources).map(
    ([module, type], index) => `export type Source${index} = import('${module}').${type};`,
  );
  writeFileSync(file, lines.join('\n'));
  const options = {
    strict: true, noEmit: true, skipLibCheck: true, module: ts.ModuleKind.NodeNext, target: ts.ScriptTarget.ES2022,
    moduleResolution: ts.ModuleResolutionKind.NodeNext, types: ['node'],
  };
  const program = ts.createProgram([file], options);
  const faults = program.getSemanticDiagnostics(program.getSourceFile(file));
  if (faults.length) throw new Error(ts.formatDiagnostics(faults, ts.createCompilerHost(options)));
  const aliases = program.getSourceFile(file).statements.filter(ts.isTypeAliasDeclaration);
  const checker = program.getTypeChecker();
  const types = Object.keys(sources).map((name, index) => [name, checker.getTypeAtLocation(aliases[index])]);
  return { checker, types: Object.fromEntries(types) };
}

export class TypeReader {
  constructor(checker) {
    this.checker = checker;
  }

  /** Types of a union without null and undefined, texts first. */
  members(type) {
    const all = type.isUnion() ? type.types : [type];
    const rank = (member) => (member.flags & TypeFlags.StringLike ? 0 : 1);
    return all
      .filter((member) => !(member.flags & (TypeFlags.Null | TypeFlags.Undefined | TypeFlags.Never)))
      .filter((member) => this.isArray(member) || isUrl(member) || !this.isFromLibrary(member))
      .sort((one, other) => rank(one) - rank(other));
  }

  // `Uint8Array` and the like, which stand for a text. `Record` has no declaration of its own.
  isFromLibrary(type) {
    const file = type.symbol?.declarations?.[0]?.getSourceFile();
    const isMapped = (type.objectFlags & ts.ObjectFlags.Mapped) !== 0;
    return Boolean(file) && !isMapped && /@types\/node|typescript\/lib/.test(file.fileName);
  }

  isArray(type) {
    return this.checker.isArrayType(type) || this.checker.isTupleType(type);
  }

  isObject(type) {
    return Boolean(type.flags & (TypeFlags.Object | TypeFlags.Intersection)) && !this.isArray(type);
  }

  elementOf(type) {
    return this.checker.getTypeArguments(type)[0];
  }

  /** Fields of an object type as `[name, type, is optional]`. */
  fields(type) {
    return this.checker.getPropertiesOfType(type).map((symbol) => [
      symbol.name, this.checker.getTypeOfSymbol(symbol), Boolean(symbol.flags & ts.SymbolFlags.Optional),
    ]);
  }

  /** Value of `type` or `role`, or an empty text. */
  kindName(type) {
    const fields = Object.fromEntries(this.fields(type));
    for (const name of ['type', 'role']) {
      const literals = fields[name] ? this.members(fields[name]) : [];
      if (literals.length && literals.every((literal) => literal.isStringLiteral())) {
        return literals.map(({ value }) => value).sort().join('|');
      }
    }
    return '';
  }

  /** Kinds of a union, and of the unions and lists in its fields, such as `message content input_text`. */
  kindNames(type, at, depth = 3) {
    const found = [];
    for (const kind of this.members(type).filter((member) => this.isObject(member))) {
      const name = this.kindName(kind);
      if (!name) continue;
      found.push(`${at} ${name}`);
      for (const [field, value] of depth ? this.fields(kind) : []) {
        for (const inner of this.members(value)) {
          const element = this.isArray(inner) ? this.elementOf(inner) : inner;
          found.push(...this.kindNames(element, `${at} ${name} ${field}`, depth - 1));
        }
      }
    }
    return found;
  }

  /** Values of a type, with every kind of every union in it; objects with their required fields, or with all. */
  examples(type, { isFull, name = '', depth = 0 }) {
    const members = depth > 2 * MAX_DEPTH ? [] : this.members(type);
    const found = members.flatMap((member) => {
      if (member.isLiteral()) return [member.value];
      if (member.flags & TypeFlags.BooleanLike) return [false];
      if (member.flags & TypeFlags.NumberLike) return [1];
      if (member.flags & TypeFlags.StringLike) return [FORMS[name] ?? WORD];
      if (member.flags & TypeFlags.AnyOrUnknown) return [OBJECTS[name] ?? FORMS[name] ?? WORD];
      if (isUrl(member)) return [new URL(FILE)];
      if (this.isArray(member)) {
        return this.examples(this.elementOf(member), { isFull, name, depth: depth + 1 }).map((each) => [each]);
      }
      if (!this.isObject(member)) return [];
      const isFree = this.fields(member).every(([, , isOptional]) => isOptional);
      return name in OBJECTS && isFree ? [OBJECTS[name]] : this.objects(member, { isFull, depth });
    });
    // Of literals the first one is enough, except that a role decides how the content is read.
    return name !== 'role' && members.every((member) => member.isLiteral()) ? found.slice(0, 1) : found;
  }

  objects(type, { isFull, depth }) {
    const fields = this.fields(type).filter(
      ([name, , isOptional]) => !isOptional || name === 'type' || (isFull && depth <= MAX_DEPTH),
    );
    const values = fields
      .map(([name, value]) => [name, this.examples(value, { isFull, name, depth: depth + 1 })])
      .filter(([, examples]) => examples.length);
    // Each value of each field once, not all combinations.
    const rows = Math.max(1, ...values.map(([, examples]) => examples.length));
    return Array.from({ length: rows }, (_, row) =>
      Object.fromEntries(values.map(([name, examples]) => [name, examples[Math.min(row, examples.length - 1)]])),
    );
  }
}
